"""A model in the format that the daemon would run for given options, for one sequence at a time."""

import dataclasses
from collections.abc import Sequence

import torch

from engine_core.cli import app
from engine_core.model_files import open_model_files
from engine_core.options.engine import EngineOptions
from engine_core.startup.device import choose_device
from engine_core.startup.model import load_by_options
from engine_core.startup.resolve import plan_runner
from kernels.cpu.linear import PackedParts
from kernels.cpu.weights import PackedLinear
from kernels.interface.operations import AttentionSpec, ForwardContext, Operations
from kernels.interface.weights import LinearWeight


class FormatError(ValueError):
    """Options that the daemon does not take."""


def parse_options(words: Sequence[str]) -> EngineOptions:
    """The daemon's own reading of its command line.

    Raises:
        FormatError: an option that it does not know or refuses.
    """
    try:
        _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
        options = bound.arguments.get("options")
        if not isinstance(options, EngineOptions):
            raise FormatError(f"{' '.join(words)!r} names no model")
        options.check()
        options.scheduling.check()
    except FormatError:
        raise
    except Exception as error:  # cyclopts has many kinds
        raise FormatError(" ".join(str(error).split())) from error
    return options


class FloatProducts:
    """In the place of a backend's `linear`: float32 products of dequantised weights."""

    def __init__(self, ops: Operations) -> None:
        self._ops, self._packed_product = ops, ops.linear
        self._floats: dict[int, tuple[LinearWeight, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if not isinstance(weight, PackedLinear | PackedParts):
            return self._packed_product(x_TE, weight)
        if id(weight) not in self._floats:  # the weight is kept, so that its id stays its own
            nothing_1E = torch.zeros(1, weight.num_inputs)
            bias_N = self._packed_product(nothing_1E, weight)[0].clone()
            self._floats[id(weight)] = (weight, self._dequantised(weight), bias_N)
        _, weight_NE, bias_N = self._floats[id(weight)]
        return torch.nn.functional.linear(x_TE, weight_NE, bias_N)

    def _dequantised(self, weight: PackedLinear | PackedParts) -> torch.Tensor:
        parts = weight.parts if isinstance(weight, PackedParts) else (weight,)
        rows = [self._ops.embedding(torch.arange(part.num_outputs), part) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class LoadedFormat:
    """
    Args:
        max_tokens: of a sequence.
        in_floats: multiply by the numbers that the weights stand for, in float32 throughout: what
            is left of a difference is the weights', not the arithmetic's.
    """

    def __init__(self, options: EngineOptions, *, max_tokens: int, in_floats: bool = False) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        files = open_model_files(str(options.model), report=lambda _line: None)
        loaded = load_by_options(options, files, choose_device(options.device))
        assembly = plan_runner(dataclasses.replace(options, max_model_len=None), files, loaded)
        self._model, self._ops = loaded.model, loaded.ops
        if in_floats:
            # layers hold the backend, so its products are replaced where all find them
            setattr(self._ops, "linear", FloatProducts(self._ops))  # noqa: B010
        spec = loaded.model.kv_cache_spec
        self._block_size = options.block_size
        self._num_blocks = -(-max_tokens // options.block_size)
        self._caches = [
            self._ops.allocate_kv_cache(
                self._num_blocks + 1,  # block 0 is the null block
                options.block_size,
                spec.num_kv_heads,
                spec.head_size,
                assembly.cache_dtype,
            )
            for _ in range(spec.num_layers)
        ]
        self._windows = spec.sliding_windows
        self._planners = {
            window: self._ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
                    block_size=options.block_size,
                    sliding_window=window,
                    max_num_seqs=1,
                    max_num_batched_tokens=max_tokens,
                    max_model_len=max_tokens,
                    dtype=loaded.dtype,
                    kv_dtype=assembly.cache_dtype,
                )
            )
            for window in set(spec.sliding_windows)
        }
        self.compute_logits = loaded.model.compute_logits

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """hidden_TE of one sequence, from its first token on."""
        num_tokens = len(token_ids)
        positions_T = torch.arange(num_tokens)
        metadata = {
            window: planner.plan(
                query_start_loc_R1=torch.tensor([0, num_tokens], dtype=torch.int32),
                seq_lens_R=torch.tensor([num_tokens], dtype=torch.int32),
                block_table_RM=torch.arange(1, self._num_blocks + 1, dtype=torch.int32)[None],
                slot_mapping_T=positions_T + self._block_size,
                num_decodes=0,
                num_decode_tokens=0,
            )
            for window, planner in self._planners.items()
        }
        context = ForwardContext(
            kv_caches=self._caches,
            metadata=[metadata[window] for window in self._windows],
            ops=self._ops,
        )
        return self._model.forward(torch.tensor(token_ids), positions_T, context)
