"""What a transformers model computes when it is left alone, and whether it computes the same over a
paged cache: an unknown architecture is used only after its logits were the same in chunks, in a
mixed batch, over shuffled blocks."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.interface import Model, ModelSpec
from engine_core.models.layer_cache import LayerCache, PagedKeys
from kernels.interface.kv_cache import KVCache
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionPlanner,
    AttentionSpec,
    ForwardContext,
    Operations,
    allocate_kv_cache,
)
from kernels.interface.special_inputs import GivenRows, replace_rows

_CACHE, _CACHE_BEFORE = "cache", "past_key_values"
"""Names of the cache in transformers: from 5.24 on, and before."""


class CausalBody:
    """
    Args:
        model: a ...ForCausalLM.
        body: the outermost of its modules that returns `last_hidden_state`.
        output_type: the class of what it returns.
    """

    def __init__(self, model: Any, body: nn.Module, output_type: type[Any]) -> None:
        self.model = model
        self._body = body
        self._output_type = output_type
        self._accepted = set(inspect.signature(body.forward).parameters)

    def accepts(self, name: str) -> bool:
        """Whether the body names this argument."""
        return name in self._accepted

    def hidden_states(
        self,
        token_ids_T: torch.Tensor,
        *,
        given: GivenRows | None = None,
        cache: Cache | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Run the body on one sequence -> hidden_TE. Arguments that it does not name are left out:
        it works them out from the others; not so the cache. `given`: None, if `embedding_size` is
        0."""
        if cache is not None:
            arguments[_CACHE if self.accepts(_CACHE) else _CACHE_BEFORE] = cache
        known = {name: value for name, value in arguments.items() if name in self._accepted}
        if given is None:
            known["input_ids"] = token_ids_T[None]
        else:
            embedded_TE = self.model.get_input_embeddings()(token_ids_T)
            known["inputs_embeds"] = replace_rows(embedded_TE, given)[None]
        output = self._body(**known)
        hidden_1TE: torch.Tensor = output.last_hidden_state
        return hidden_1TE[0]

    def embedding_size(self, token_ids_T: torch.Tensor) -> int:
        """Columns of `inputs_embeds`; 0 if with these tokens' embeddings in place of their ids the
        model fails, or computes something else."""
        try:
            rows_TE = self.model.get_input_embeddings()(token_ids_T)
            places = torch.arange(len(token_ids_T), device=token_ids_T.device)
            given = GivenRows(places, rows_TE.clone())
            hidden_TE = self.hidden_states(token_ids_T, given=given, use_cache=False)
            is_same = torch.equal(hidden_TE, self.hidden_states(token_ids_T, use_cache=False))
        except Exception:  # code of others, for any of 190 architectures
            return 0
        return rows_TE.shape[1] if is_same else 0

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Run what follows the body -> float32 logits_RV."""
        token_ids_1R = hidden_RE.new_zeros(1, hidden_RE.shape[0], dtype=torch.int64)
        with self._answering(self._output_type(last_hidden_state=hidden_RE[None])):
            output = self.model(input_ids=token_ids_1R, use_cache=False)
        logits_1RV: torch.Tensor = output.logits
        return logits_1RV[0].float()

    @contextmanager
    def _answering(self, output: Any) -> Iterator[None]:
        """The body answers `output` to every call."""

        def answer(*_args: object, **_kwargs: object) -> Any:
            return output

        self._body.forward = answer
        try:
            yield
        finally:
            # uncovers the method of the class again
            del self._body.forward


def run_and_find_body(model: Any, token_ids_T: torch.Tensor) -> tuple[CausalBody, Any]:
    """Run the whole model once, plainly -> (its two halves, its output).
    Raises UnsupportedArchitecture: no module returns hidden states, or nothing returns logits."""
    seen: list[tuple[nn.Module, type[Any]]] = []

    def remember(module: nn.Module, _args: object, output: object) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            seen.append((module, type(output)))

    handles = [
        module.register_forward_hook(remember) for module in model.modules() if module is not model
    ]
    try:
        output = model(input_ids=token_ids_T[None], use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    if not seen or not isinstance(getattr(output, "logits", None), torch.Tensor):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not go from hidden states to logits in a way that can be "
            "split; only language models that do are supported"
        )
    # hooks fire when a module returns, so the outermost comes last
    body, output_type = seen[-1]
    return CausalBody(model, body, output_type), output


# ---------------------------------------------------------------------- comparison


_SEQUENCE_LENS = (8, 5)
_STEPS = ({0: 5, 1: 3}, {1: 2, 0: 2}, {0: 1})
"""Tokens of each sequence: two first chunks, a mixed step in another order, a decode alone."""
_BLOCK_SIZE = 4
_BLOCK_TABLES = ((5, 2), (1, 4))

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
"""Largest difference of a logit, as a share of the largest distance of a logit from their mean.
Sums in another order differ by a hundredth of this; a wrong position or mask by a hundred times."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A plain run of a model on `token_ids`.

    Attributes:
        logits: float32, [length of the sequence, V] for each sequence.
        layers: what transformers' own cache keeps; keys and values both have the larger size.
        embedding_size: see `CausalBody.embedding_size`.
    """

    body: CausalBody
    token_ids: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]
    layers: tuple[PagedKeys, ...]
    embedding_size: int

    @property
    def vocab_size(self) -> int:
        return self.logits[0].shape[1]


def run_reference(model: Any) -> Reference:
    """Run the model plainly on two short sequences.
    Raises UnsupportedArchitecture: it has no ordinary KV cache in every layer."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config(decoder=True)
    ids = torch.arange(config.vocab_size)
    # some models hide padding from themselves
    ids = ids[ids != (getattr(config, "pad_token_id", None) or 0)]
    token_ids = tuple(
        ids[torch.randint(len(ids), (length,), generator=generator)].to(model.device)
        for length in _SEQUENCE_LENS
    )
    body, output = run_and_find_body(model, token_ids[0])
    layers = _read_cache(model, getattr(output, _CACHE, getattr(output, _CACHE_BEFORE, None)))
    logits = [output.logits, *(model(input_ids=ids_L[None]).logits for ids_L in token_ids[1:])]
    return Reference(
        body=body,
        token_ids=token_ids,
        logits=tuple(logits_1LV[0].float() for logits_1LV in logits),
        layers=layers,
        embedding_size=body.embedding_size(token_ids[0]),
    )


def _read_cache(model: Any, cache: object) -> tuple[PagedKeys, ...]:
    name = type(model).__name__
    if not isinstance(cache, DynamicCache) or not cache.layers:
        raise UnsupportedArchitecture(
            f"{name} keeps no key/value cache; decoders that do are supported"
        )
    layers: list[PagedKeys] = []
    for layer in cache.layers:
        # exactly these: their subclasses hold states beside keys and values
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.is_initialized:
            has_mamba = any(hasattr(each, "x_proj") for each in model.modules())
            kind = "Mamba-1, which is missing here; Mamba-2, as in Bamba, is not"
            kind = kind if has_mamba else type(layer).__name__
            raise UnsupportedArchitecture(
                f"{name} has layers without keys and values of their own ({kind}); models with "
                "attention in every layer are supported"
            )
        size = max(layer.keys.shape[3], layer.values.shape[3])
        window = int(layer.sliding_window) if layer.is_sliding else None
        layers.append(PagedKeys(layer.keys.shape[1], size, size, window))
    return tuple(layers)


def largest_difference(
    model: Model, reference: Reference, *, dtype: torch.dtype, ops: Operations
) -> float:
    """Run the reference's sequences over a paged cache; how far the logits are off, where 1 is the
    most that rounding explains."""
    caches = _caches(model.spec, dtype, ops)
    planners = _make_planners(model.spec, dtype, ops)
    num_computed = [0] * len(reference.token_ids)
    worst = 0.0
    for counts in _STEPS:
        spans = [(row, num_computed[row], num_computed[row] + n) for row, n in counts.items()]
        context = ForwardContext(
            kv_caches=caches, metadata=_plan(model.spec, spans, planners, ops.device), ops=ops
        )
        hidden_TE = model.forward(
            torch.cat([reference.token_ids[row][start:stop] for row, start, stop in spans]),
            torch.cat([torch.arange(start, stop, device=ops.device) for _, start, stop in spans]),
            context,
        )
        expected_TV = torch.cat([reference.logits[row][start:stop] for row, start, stop in spans])
        distance = (model.compute_logits(hidden_TE) - expected_TV).abs().max()
        spread = (expected_TV - expected_TV.mean(dim=1, keepdim=True)).abs().max()
        # written so that NaN counts as infinitely far off
        off = float(distance / spread / _TOLERANCE[dtype])
        worst = max(worst, off if off == off else float("inf"))
        for row, _, stop in spans:
            num_computed[row] = stop
    return worst


def _caches(spec: ModelSpec, dtype: torch.dtype, ops: Operations) -> list[KVCache]:
    num_blocks = 1 + max(max(table) for table in _BLOCK_TABLES)
    return [
        allocate_kv_cache(ops, num_blocks, keys.kv_shape(_BLOCK_SIZE, dtype))
        for keys in map(spec.keys_of, range(spec.num_layers))
    ]


def _make_planners(
    spec: ModelSpec, dtype: torch.dtype, ops: Operations
) -> dict[LayerCache, AttentionPlanner]:
    """A planner for each kind of layer."""
    return {
        keys: ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=keys.num_kv_heads,
                head_size=keys.key_size,
                block_size=_BLOCK_SIZE,
                sliding_window=keys.window,
                max_num_seqs=len(_SEQUENCE_LENS),
                max_num_batched_tokens=sum(_SEQUENCE_LENS),
                max_model_len=max(_SEQUENCE_LENS),
                dtype=dtype,
                kv_dtype=dtype,
            )
        )
        for keys in {spec.keys_of(layer) for layer in range(spec.num_layers)}
    }


def _plan(
    spec: ModelSpec,
    spans: Sequence[tuple[int, int, int]],
    planners: dict[LayerCache, AttentionPlanner],
    device: torch.device,
) -> list[AttentionMetadata]:
    as_int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    slots = [
        _BLOCK_TABLES[row][position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        for row, start, stop in spans
        for position in range(start, stop)
    ]
    lengths = [stop - start for _, start, stop in spans]
    # none is called a decode: a backend takes any order then
    by_kind = {
        keys: planner.plan(
            query_start_loc_R1=as_int32([0, *itertools.accumulate(lengths)]),
            seq_lens_R=as_int32([stop for _, _, stop in spans]),
            block_table_RM=as_int32([_BLOCK_TABLES[row] for row, _, _ in spans]),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=device),
            num_decodes=0,
            num_decode_tokens=0,
        )
        for keys, planner in planners.items()
    }
    return [by_kind[layer] for layer in spec.layers]
