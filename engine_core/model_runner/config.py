"""What a model runner is made of, and how a model's layers share its cache."""

import dataclasses
from collections.abc import Sequence

import torch

from engine_core.adapters.pool import AdapterPool
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.logits_processors import NamedProcessor
from engine_core.model_runner.pooling import Pooler
from engine_core.models.heads.eagle import EagleHead
from engine_core.models.interface import KVCacheSpec, Model
from engine_core.models.multimodal.interface import MultiModalEncoder
from engine_core.models.parallel.stages import Stage
from kernels.interface.operations import Operations, cached_head_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table. `sliding_window` in tokens, None for full attention."""

    layers: tuple[int, ...]
    sliding_window: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the layers of a model share the KV blocks, after Jenga (arXiv:2503.18292). Layers that
    attend alike form groups of one size, each with a block table of its own: one pool of blocks
    serves all.

        tensor 0   | layer 5  (full)    | layer 0  (window)  | layer 3 (window) |
        tensor 1   | layer 11 (full)    | layer 1  (window)  | layer 4 (window) |
                   |       group 0      |      group 1       |     group 2      |  a column a group

    A block id addresses the same block in every tensor of the row that its group's layer uses."""

    groups: tuple[LayerGroup, ...]
    num_tensors: int

    @property
    def group_specs(self) -> list[KVCacheGroupSpec]:
        """The groups as the cache's bookkeeping knows them."""
        return [KVCacheGroupSpec(group.sliding_window) for group in self.groups]

    def place_of(self, layer: int) -> tuple[int, int]:
        """(group index, tensor index) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)


def plan_cache_layout(
    sliding_windows: Sequence[int | None], stage: Stage | None = None
) -> CacheLayout:
    """Group a model's layers. All stages have the whole model's groups, as one scheduler writes
    their tables: each shares out its own layers among them, and has their part of every block.

    Args:
        sliding_windows: for each layer its window in tokens, or None for full attention.
        stage: of the model; None: all of it.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        kinds.setdefault(window, []).append(layer)
    # The smallest kind sets the size, so that larger kinds split into groups of that size; unless
    # kinds are nearly equal, when one group a kind wastes less than a second group would.
    smallest = min(len(layers) for layers in kinds.values())
    largest = max(len(layers) for layers in kinds.values())
    size = largest if largest <= smallest * 1.25 else smallest
    ordered = sorted(kinds.items(), key=lambda item: item[0] is not None)
    groups = tuple(
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in ordered
        for start in range(0, len(layers), size)
    )
    if stage is not None:
        groups = tuple(
            group
            for window, layers in ordered
            for group in _shared_out(
                [layer for layer in layers if layer in stage.layers],
                window,
                num_groups=-(-len(layers) // size),
            )
        )
    return CacheLayout(groups, num_tensors=max(len(group.layers) for group in groups))


def _shared_out(layers: list[int], window: int | None, *, num_groups: int) -> list[LayerGroup]:
    """Evenly; the last groups may be empty."""
    size = -(-len(layers) // num_groups)
    starts = range(0, size * num_groups, size) if size else [0] * num_groups
    return [LayerGroup(tuple(layers[start : start + size]), window) for start in starts]


@dataclasses.dataclass(frozen=True, slots=True)
class DraftConfig:
    """A model that makes drafts for the runner's.

    Its layers are the last of the cache's: a block holds what both models keep of its tokens, so
    whatever becomes of a block (found by another request, copied, swapped, kept on disk) becomes of
    both, and a token takes what both models take of it, without a second table."""

    model: Model | EagleHead
    ops: Operations
    """The backend that it was loaded with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """
    Attributes:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        num_blocks: usable blocks on the device; one more is allocated for the null block, id 0.
        num_host_blocks: blocks in host memory that a plan may copy from and to.
        block_size: tokens a block.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        max_num_batched_tokens: most tokens of a step.
        max_num_drafts: most drafts among these.
        dtype: of the activations.
        kv_dtype: of the cache.
        eos_token_ids: what min_tokens forbids beside a request's own stop tokens.
        adapters: those whose weights are beside the model; None: requests have none.
        draft: of the same vocabulary; None: the runner makes no drafts.
        logits_processors: the operator's, in order; a CPU's runner has them.
        encoder: of images or sounds; None: prompts are text. A CPU's runner has one.
        pooler: of pooling requests; None: there are none.
        stage: of the model, in a pipeline; None: all of it. Only the last one samples.
        collectives: of the ranks that run the model together.
    """

    model: Model
    ops: Operations
    num_blocks: int
    num_host_blocks: int = 0
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    adapters: AdapterPool | None = None
    max_num_drafts: int = 0
    draft: DraftConfig | None = None
    logits_processors: tuple[NamedProcessor, ...] = ()
    encoder: MultiModalEncoder | None = None
    pooler: Pooler | None = None
    stage: Stage | None = None
    collectives: Collectives = SINGLE_RANK

    def __post_init__(self) -> None:
        """Raises ValueError: two models whose layers cannot share blocks."""
        if self.draft is None or len(self.layout.groups) == 1:
            return
        ours, theirs = (spec.kv_cache_spec for spec in (self.model, self.draft.model))
        if (ours.num_kv_heads, ours.head_size) != (theirs.num_kv_heads, theirs.head_size):
            raise ValueError(
                f"the draft model has {theirs.num_kv_heads} key/value heads of {theirs.head_size}, "
                f"the model {ours.num_kv_heads} of {ours.head_size}, and some layers have sliding "
                "windows, whose blocks can be shared by layers of one shape only; use "
                "--draft-model first-layers:N, or another draft model"
            )

    @property
    def max_num_logits(self) -> int:
        """Most rows of logits of a step: one a sequence, and one a draft."""
        return self.max_num_seqs + self.max_num_drafts

    @property
    def layout(self) -> CacheLayout:
        """How layers share blocks; those of the draft model come last."""
        windows = self.model.kv_cache_spec.sliding_windows
        if self.draft is not None:
            windows += self.draft.model.kv_cache_spec.sliding_windows
        return plan_cache_layout(windows, self.stage)

    @property
    def tensor_specs(self) -> list[KVCacheSpec]:
        """Of each cache tensor the model whose shape it has."""
        spec, layout = self.model.kv_cache_spec, self.layout
        specs = [spec] * layout.num_tensors
        if self.draft is not None and len(layout.groups) == 1:
            specs[spec.num_layers :] = [self.draft.model.kv_cache_spec] * (
                layout.num_tensors - spec.num_layers
            )
        return specs

    @property
    def num_groups(self) -> int:
        """KV-cache groups, each with a block table of its own."""
        return len(self.layout.groups)

    @property
    def block_bytes(self) -> int:
        """Memory of one block over all cache tensors."""
        return (
            2
            * self.block_size
            * sum(
                spec.num_kv_heads * cached_head_bytes(spec.head_size, self.kv_dtype)
                for spec in self.tensor_specs
            )
        )

    @property
    def vocab_size(self) -> int:
        return self.model.kv_cache_spec.vocab_size
