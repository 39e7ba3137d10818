"""What a model runner is made of, and how a model's layers share its cache."""

import dataclasses
from collections.abc import Sequence

import torch

from engine_core.adapters.pool import AdapterPool
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.kv_cache import KVCacheGroupSpec, PoolIds, PoolSizes, sizes_of
from engine_core.logits_processors import NamedProcessor
from engine_core.model_runner.pooling import Pooler
from engine_core.models.heads.head import DraftHead
from engine_core.models.interface import Model
from engine_core.models.layer_cache import LayerCache
from engine_core.models.multimodal.interface import MultiModalEncoder
from engine_core.models.parallel.stages import Stage
from kernels.interface.kv_cache import LAYER_ALIGNMENT
from kernels.interface.operations import Operations


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table, in the order in which they lie in a block."""

    layers: tuple[int, ...]
    spec: KVCacheGroupSpec


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the layers of a model share the KV blocks, after Jenga (arXiv:2503.18292). Layers that
    look back alike form groups of about equal bytes, each with a block table of its own: one pool
    of blocks serves all whose blocks such groups fill. In a block the layers of its group lie side
    by side:

        block of group 0   | layer 5 (full)         | layer 11 (full)         |
        block of group 1   | layer 0 (window) | layer 1 | layer 2 | layer 3 |/|  what is left over

    Attributes:
        offsets: of each layer that keeps something, in bytes from a block's start.
        pool_bytes: of a block of each pool, its largest group's.
    """

    groups: tuple[LayerGroup, ...]
    offsets: dict[int, int]
    pool_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool that has the largest."""
        return max(self.pool_bytes)

    def num_bytes(self, num_blocks: PoolSizes) -> int:
        """Bytes of so many blocks."""
        each = zip(self.sizes(num_blocks), self.pool_bytes, strict=True)
        return sum(number * size for number, size in each)

    def sizes(self, num_blocks: PoolSizes) -> tuple[int, ...]:
        """Blocks of each pool; one number of several pools is each one's."""
        sizes = sizes_of(num_blocks)
        return sizes * len(self.pool_bytes) if len(sizes) == 1 else sizes

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple([self.pool_bytes[group.spec.pool] for group in self.groups])

    @property
    def group_specs(self) -> list[KVCacheGroupSpec]:
        """The groups as the cache's bookkeeping knows them."""
        return [group.spec for group in self.groups]

    def group_of(self, layer: int) -> int:
        """The index of its group; of a layer that keeps something."""
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)


def plan_cache_layout(
    layers: Sequence[LayerCache], block_size: int, dtype: torch.dtype, own: range | None = None
) -> CacheLayout:
    """Group a model's layers. All stages have the whole model's groups, as one scheduler writes
    their tables: each shares out its own layers among them, and has their part of every block.
    Kinds whose groups would leave much of a pool's blocks empty have a pool of their own.

    Args:
        block_size, dtype: of the cache.
        own: the layers of this stage; None: all.
    """
    sizes = [layer.block_bytes(block_size, dtype) for layer in layers]
    sizes = [-(-size // LAYER_ALIGNMENT) * LAYER_ALIGNMENT for size in sizes]
    kinds: dict[KVCacheGroupSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        if sizes[index]:
            kind = KVCacheGroupSpec(layer.reach, is_sparse=layer.is_sparse)
            kinds.setdefault(kind, []).append(index)
    groups: list[LayerGroup] = []
    offsets: dict[int, int] = {}
    pool_bytes: list[int] = []
    for pool, members in enumerate(_pools(kinds, sizes)):
        block_bytes = LAYER_ALIGNMENT  # of a stage that has none of these layers, too
        for kind, parts in zip(members, _parts(members, kinds, sizes), strict=True):
            if own is not None:
                parts = _shared_out([each for each in kinds[kind] if each in own], len(parts))
            spec = dataclasses.replace(kind, pool=pool)
            groups += [LayerGroup(tuple(part), spec) for part in parts]
            for part in parts:
                end = 0
                for index in part:
                    offsets[index] = end
                    end += sizes[index]
                block_bytes = max(block_bytes, end)
        pool_bytes.append(block_bytes)
    return CacheLayout(tuple(groups), offsets, tuple(pool_bytes))


Kinds = dict[KVCacheGroupSpec, list[int]]
"""The layers of each kind."""


def _pools(kinds: Kinds, sizes: list[int]) -> list[list[KVCacheGroupSpec]]:
    """The kinds of each pool: each kind in the first one where it and those that are there fill
    their blocks."""
    pools: list[list[KVCacheGroupSpec]] = []
    for kind in sorted(kinds, key=lambda kind: not kind.keeps_all):
        home = next((pool for pool in pools if _fill_blocks([*pool, kind], kinds, sizes)), None)
        if home is None:
            pools.append([kind])
        else:
            home.append(kind)
    return pools


def _fill_blocks(members: list[KVCacheGroupSpec], kinds: Kinds, sizes: list[int]) -> bool:
    """Whether each kind fills more than half of its blocks. Kinds of equal layers do: of one that
    is cut all groups but the last are full."""
    of_kinds = [
        [sum(sizes[index] for index in part) for part in parts]
        for parts in _parts(members, kinds, sizes)
    ]
    block_bytes = max(map(max, of_kinds))
    return all(2 * sum(filled) > block_bytes * len(filled) for filled in of_kinds)


def _parts(
    members: list[KVCacheGroupSpec], kinds: Kinds, sizes: list[int]
) -> list[list[list[int]]]:
    """The groups of each kind in a pool. The smallest kind sets the size, so that larger kinds
    split into groups of that size; unless kinds are nearly equal, when one group a kind wastes less
    than a second group would."""
    totals = [sum(sizes[index] for index in kinds[kind]) for kind in members]
    size = max(totals) if max(totals) <= min(totals) * 1.25 else min(totals)
    return [_cut(kinds[kind], sizes, size) for kind in members]


def _cut(layers: list[int], sizes: list[int], most: int) -> list[list[int]]:
    """Cut layers, in order, into parts of at most so many bytes, or of one layer."""
    parts: list[list[int]] = []
    left = 0
    for layer in layers:
        if not parts or sizes[layer] > left:
            parts.append([])
            left = most
        parts[-1].append(layer)
        left -= sizes[layer]
    return parts


def _shared_out(layers: list[int], num_parts: int) -> list[list[int]]:
    """Evenly; the last parts may be empty."""
    size = -(-len(layers) // num_parts)
    return [layers[start * size : (start + 1) * size] for start in range(num_parts)]


@dataclasses.dataclass(frozen=True, slots=True)
class DraftConfig:
    """A model that makes drafts for the runner's.

    Its layers are the last of the cache's: a block holds what both models keep of its tokens, so
    whatever becomes of a block (found by another request, copied, swapped, kept on disk) becomes of
    both, and a token takes what both models take of it, without a second table."""

    model: Model | DraftHead
    ops: Operations
    """The backend that it was loaded with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """
    Attributes:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        num_blocks: usable blocks on the device; one more is allocated for the null block, id 0. One
            number of several pools is each one's.
        num_host_blocks: likewise, blocks in host memory that a plan may copy from and to.
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
        reports_processed: what is reported of sampled tokens is of what they are drawn from, not of
            the model's logits.
        reports_logits: these logits are reported in place of log-probabilities.
        encoder: of images or sounds; None: prompts are text. A CPU's runner has one.
        pooler: of pooling requests; None: there are none.
        stage: of the model, in a pipeline; None: all of it. Only the last one samples.
        collectives: of the ranks that run the model together.
    """

    model: Model
    ops: Operations
    num_blocks: PoolSizes
    num_host_blocks: PoolSizes = 0
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
    reports_processed: bool = False
    reports_logits: bool = False
    encoder: MultiModalEncoder | None = None
    pooler: Pooler | None = None
    stage: Stage | None = None
    collectives: Collectives = SINGLE_RANK

    @property
    def max_num_logits(self) -> int:
        """Most rows of logits of a step: one a sequence, and one a draft."""
        return self.max_num_seqs + self.max_num_drafts

    @property
    def layout(self) -> CacheLayout:
        """How layers share blocks; those of the draft model come last."""
        own = None if self.stage is None else self.model.spec.places(self.stage.layers)
        return plan_cache_layout(self.layers, self.block_size, self.kv_dtype, own)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """Caches of all layers, those of the model before those of the draft model."""
        return self.model.spec.caches + (() if self.draft is None else self.draft.model.spec.caches)

    @property
    def num_groups(self) -> int:
        """KV-cache groups, each with a block table of its own."""
        return len(self.layout.groups)

    @property
    def block_ids(self) -> PoolIds:
        """Ids of the device's blocks."""
        return PoolIds(self.layout.sizes(self.num_blocks))

    @property
    def host_block_ids(self) -> PoolIds:
        """Ids of blocks in host memory."""
        sizes = self.layout.sizes(self.num_host_blocks)
        return PoolIds(sizes, self.block_ids.num_blocks + 1)

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size
