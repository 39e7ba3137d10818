"""The adapters whose weights are with the model: a bounded number of slots beside its products."""

from collections.abc import Mapping
from pathlib import Path

import torch

from engine_core.adapters.adapter import AdapterTargets, read_adapter
from engine_core.devices import traits_of
from engine_core.models.decoder import Decoder, decoder_of
from engine_core.models.interface import Model
from kernels.interface.lora import LoRAPart, LoRARows, LoRAStack
from kernels.interface.operations import Operations

Prepared = Mapping[int, object]
"""An adapter in the backend's layout, by product."""

_FLOAT32_BYTES = 4


class AdapterPool:
    """Slots for adapters of one model, or of models of its shape in turn.

    Args:
        num_slots: most adapters at once; each of rank `max_rank` at most.
        max_num_tokens: of a step.
        dtype: of the activations.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Operations,
        *,
        num_slots: int,
        max_rank: int,
        max_num_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.slot_of: dict[str, int] = {}
        """The slots of adapters, by fingerprint."""
        self.rows: LoRARows = ops.lora_rows(
            num_slots, max_rank=max_rank, max_num_tokens=max_num_tokens, dtype=dtype
        )
        self._device = ops.device
        self._model: Decoder | None = None
        self._stacks: list[LoRAStack] = []
        self.targets = AdapterTargets.of_model(model)
        self._sizes = [
            (linear.num_inputs, [size for _, size in linear.parts]) for linear in model.linears
        ]
        self.attach(model)

    @property
    def num_bytes(self) -> int:
        """Most memory that it takes: one adapter more may be on its way to a slot."""
        each = sum(
            self.max_rank * (len(sizes) * num_inputs + sum(sizes))
            for num_inputs, sizes in self._sizes
        )
        return (self.num_slots + 1) * each * _FLOAT32_BYTES

    def attach(self, model: Model) -> None:
        """Serve this model from now on; all slots are empty if it is another one."""
        if model is self._model:
            return
        model = decoder_of(model, "adapters")
        self.slot_of.clear()
        self._stacks = [self.rows.make_stack(*sizes) for sizes in self._sizes]
        for linear, stack in zip(model.linears, self._stacks, strict=True):
            linear.lora = stack
        model.forget_caches()
        self._model = model

    def detach(self) -> None:
        """Let go of the model and of all weights."""
        self._model, self._stacks = None, []
        self.slot_of.clear()

    def read(self, path: Path) -> tuple[str, Prepared | None]:
        """The adapter's fingerprint, and what `place` takes; None of a pool without a model. Any
        thread may call it. Raises AdapterError."""
        adapter = read_adapter(path, self.targets, max_rank=self.max_rank)
        return adapter.fingerprint, self.prepare(adapter.parts) if self._stacks else None

    def prepare(self, parts: Mapping[int, Mapping[int, LoRAPart]]) -> Prepared:
        """Weights by product and part of it, in the backend's layout. Any thread may call it."""
        stacks = self._stacks
        return {index: stacks[index].prepare(part) for index, part in parts.items()}

    def place(self, slot: int, fingerprint: str, prepared: Prepared | None) -> None:
        """Fill a slot that no row has, or empty it; between two steps."""
        self._synchronize()
        self.slot_of = {key: used for key, used in self.slot_of.items() if used != slot}
        for index, stack in enumerate(self._stacks):
            stack.place(slot, None if prepared is None else prepared.get(index))
        self._synchronize()
        if prepared is not None:
            self.slot_of[fingerprint] = slot

    def _synchronize(self) -> None:
        """Steps run on a stream of their own."""
        if not traits_of(self._device).is_host:
            torch.cuda.synchronize(self._device)
