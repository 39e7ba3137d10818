"""transformers' models over the engine's paged KV cache: all tokens of a step at once through an
attention function of ours, or, for models with attention of their own, one request at a time."""

import itertools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from engine_core.models.interface import Feature, ModelSpec
from engine_core.models.transformers.reference import CausalBody
from kernels.interface.kv_cache import KVCache
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    ForwardContext,
    Operations,
)

_NAME = "engine_core_paged"

_IGNORED = frozenset({"position_ids", "cache_position", "use_cache", "layer_idx", "num_items"})
"""Arguments that other backends need and that say nothing about the result."""


class UnsupportedAttention(Exception):
    """The model asks of attention what ours does not do; the message says what."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention: what the layer asked for."""

    layer: int
    num_query_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None
    softcap: float | None


_target: ContextVar[ForwardContext | list[AttentionCall]] = ContextVar("attention_target")
"""Where the layers of the running forward pass find their cache; or the list that takes their calls
down, when only those are wanted."""


def switch_to_paged_attention(model: Any) -> None:
    """Raises UnsupportedAttention: the model's attention cannot be replaced."""
    if not model._supports_attention_backend:
        raise UnsupportedAttention("its attention cannot be replaced")
    AttentionInterface.register(_NAME, _attend)
    # This name has no mask function on purpose: transformers then passes no mask.
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        raise UnsupportedAttention("its attention cannot be replaced")


def record_attention(body: CausalBody, token_ids_T: torch.Tensor) -> list[AttentionCall]:
    """What each layer asks for, in order of layers. The model must have been switched.
    Raises UnsupportedAttention: more than we do, or not exactly one attention a layer."""
    if not body.accepts("position_ids"):
        raise UnsupportedAttention("it takes no position_ids")
    calls: list[AttentionCall] = []
    token = _target.set(calls)
    try:
        positions_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
        body.hidden_states(token_ids_T, position_ids=positions_T[None], use_cache=False)
    finally:
        _target.reset(token)
    if [call.layer for call in calls] != list(range(len(calls))) or not calls:
        raise UnsupportedAttention("its layers do not each attend once, in order")
    if len({call.num_query_heads for call in calls}) > 1:
        raise UnsupportedAttention("its layers have different numbers of query heads")
    return calls


class _SplitModel:
    """The parts of `engine_core.models.Model` that need no attention."""

    supports: frozenset[Feature] = frozenset({"prompt_embeds"})

    def __init__(self, body: CausalBody, spec: ModelSpec) -> None:
        self._body = body
        self.spec = spec

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._body.logits(hidden_RE)


class FlattenedModel(_SplitModel):
    """All tokens of a step at once, over a switched model."""

    @torch.inference_mode()
    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        token = _target.set(context)
        try:
            return self._body.hidden_states(
                token_ids_T, given=context.given, position_ids=positions_T[None], use_cache=False
            )
        finally:
            _target.reset(token)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for every layer, by these names: heads first, [1, H or K, T, d]
    -> [1, T, H, head size of v]."""
    target = _target.get()
    call = _read_call(module, query, key, attention_mask, options)
    if isinstance(target, list):
        target.append(call)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    metadata = target.metadata[call.layer]
    kv_cache = target.kv_caches[call.layer]
    head_size = kv_cache.shape.key_size
    target.ops.write_kv_cache(
        tokens_first(key, head_size),
        tokens_first(value, head_size),
        metadata.slot_mapping_T,
        kv_cache,
    )
    out_THD = target.ops.paged_attention(
        tokens_first(query, head_size),
        *kv_cache.parts,
        metadata,
        AttentionParams(scale=call.scale, sliding_window=call.sliding_window, softcap=call.softcap),
    )
    return out_THD[None, :, :, : value.shape[3]], None


def tokens_first(heads_1KTD: torch.Tensor, head_size: int) -> torch.Tensor:
    """[1, K, T, d] -> [T, K, head_size]; zeros behind a smaller head change no product."""
    states_TKD = heads_1KTD[0].transpose(0, 1)
    missing = head_size - states_TKD.shape[2]
    return pad(states_TKD, (0, missing)) if missing else states_TKD.contiguous()


def _read_call(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    if attention_mask is not None:
        raise UnsupportedAttention("it builds an attention mask of its own")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("its attention layers have no index")
    rest = dict(options)
    scale = rest.pop("scaling", None)
    window = rest.pop("sliding_window", None)
    softcap = rest.pop("softcap", None)
    if not rest.pop("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttention("its attention is not causal")
    for name, value in rest.items():
        wanted = value is not None and value is not False and name not in _IGNORED
        if wanted and not (name == "dropout" and value == 0):
            raise UnsupportedAttention(f"its attention takes {name}")
    return AttentionCall(
        layer=layer,
        num_query_heads=query_1HTD.shape[1],
        num_kv_heads=key_1KTD.shape[1],
        scale=query_1HTD.shape[3] ** -0.5 if scale is None else float(scale),
        sliding_window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
    )


# ---------------------------------------------------------------------- one request at a time


class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of one request, for one forward pass.

    Args:
        read_slots_L: int64, slot of every token of the sequence, this step's included.
        write_slots_Q: int64, those of this step's tokens, which are the last ones.
    """

    is_sliding = False

    def __init__(
        self,
        kv_cache: KVCache,
        ops: Operations,
        read_slots_L: torch.Tensor,
        write_slots_Q: torch.Tensor,
    ) -> None:
        super().__init__()
        self._kv_cache = kv_cache
        self._ops = ops
        self._read_slots_L = read_slots_L
        self._write_slots_Q = write_slots_Q
        self._num_seen = len(read_slots_L) - len(write_slots_Q)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the blocks are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, K, Q, d] keys and values -> those of the whole sequence, [1, K, L, d]."""
        head_size = self._kv_cache.shape.key_size
        self._ops.write_kv_cache(
            tokens_first(key_states, head_size),
            tokens_first(value_states, head_size),
            kv_cache=self._kv_cache,
            slot_mapping_T=self._write_slots_Q,
        )
        self._num_seen = len(self._read_slots_L)
        keys, values = (
            states_LKD.transpose(0, 1)[None, :, :, :own_size]
            for states_LKD, own_size in zip(
                self._ops.read_kv_cache(self._kv_cache, self._read_slots_L),
                (key_states.shape[3], value_states.shape[3]),
                strict=True,
            )
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self._num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys, position of the first one)."""
        return self._num_seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PerRequestModel(_SplitModel):
    """Runs the requests of a step one by one."""

    @torch.inference_mode()
    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        first = context.metadata[0]
        starts = first.query_start_loc_R1.tolist()
        hidden_by_request = [
            self._forward_request(
                request, token_ids_T[start:stop], positions_T[start:stop], start, context
            )
            for request, (start, stop) in enumerate(itertools.pairwise(starts))
        ]
        return torch.cat(hidden_by_request)

    def _forward_request(
        self,
        request: int,
        token_ids_Q: torch.Tensor,
        positions_Q: torch.Tensor,
        start: int,
        context: ForwardContext,
    ) -> torch.Tensor:
        stop = start + len(token_ids_Q)
        # layers of one KV-cache group share a metadata object, and with it the slots
        slots = {
            key: _slots_of_sequence(metadata, request)
            for key, metadata in {id(each): each for each in context.metadata}.items()
        }
        layers = [
            PagedCacheLayer(
                kv_cache, context.ops, slots[id(metadata)], metadata.slot_mapping_T[start:stop]
            )
            for kv_cache, metadata in zip(context.kv_caches, context.metadata, strict=True)
        ]
        num_tokens = int(context.metadata[0].seq_lens_R[request])
        return self._body.hidden_states(
            token_ids_Q,
            given=None if context.given is None else context.given.part(start, stop),
            attention_mask=torch.ones(1, num_tokens, dtype=torch.int64, device=token_ids_Q.device),
            position_ids=positions_Q[None],
            cache=Cache(layers=layers),
            use_cache=True,
        )


def _slots_of_sequence(metadata: AttentionMetadata, request: int) -> torch.Tensor:
    positions_L = torch.arange(
        int(metadata.seq_lens_R[request]), device=metadata.block_table_RM.device
    )
    blocks_L = metadata.block_table_RM[request, positions_L // metadata.block_size].long()
    return blocks_L * metadata.block_size + positions_L % metadata.block_size
