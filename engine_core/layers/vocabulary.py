"""Token embedding and language-model head, tied or not."""

from functools import partial
from itertools import pairwise

import torch

from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import (
    AnyPlacement,
    CopyWeight,
    PackedPlacement,
    Placement,
    Placements,
)
from engine_core.layers.per_layer import PerLayerInputs
from kernels.interface.operations import Operations
from kernels.interface.sampling import SamplingOperations
from kernels.interface.special_inputs import GivenRows
from kernels.interface.weights import LinearWeight, QuantisedTensor, WeightPacking, WeightPart

_LEAST_BITS = 8
"""Logits feel every error of a head at once; files in 4 bits keep it in 6 or 8, too."""


def token_ranges(vocab_size: int, num_ranks: int) -> list[range]:
    """Ids whose rows of embedding and head each rank has: whole words of a bit mask, if there are
    enough of them; no rank has none."""
    unit = 32 if vocab_size // 32 >= num_ranks else 1
    number = -(-vocab_size // unit)
    stops = [min(vocab_size, rank * number // num_ranks * unit) for rank in range(num_ranks + 1)]
    return [range(*pair) for pair in pairwise(stops)]


class Vocabulary:
    """`begin` at the bottom of a model, `logits` at its top.

    Of several ranks each has the rows of its `tokens`, and one of zeros, which all other ids find:
    the sum over the ranks is the embedding. A rank's logits are of its tokens, as the host samples
    from shards; a device that samples on its own gets those of all.

    A tied head is the embedding itself where the backend packs weights and reads rows of them;
    where it repacks without that, a copy: memory for one more [V, E], two to five times faster
    products.

    Args:
        tied: the head is the embedding, unless the checkpoint holds another head.
        embedding_scale: factor on embeddings, rounded to the model's dtype.
        embeds, heads: whether the stage at hand does, of a model in stages.
        logits_divisor: logits are divided by it.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        collectives: of the ranks that share it.
        per_layer: what is made of tokens and their embeddings for each layer, if anything is.
    """

    def __init__(
        self,
        *,
        embedding_name: str,
        head_name: str,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        embedding_scale: float | None,
        softcap: float | None,
        logits_divisor: float = 1.0,
        embeds: bool = True,
        heads: bool = True,
        dtype: torch.dtype,
        ops: Operations,
        collectives: Collectives = SINGLE_RANK,
        per_layer: PerLayerInputs | None = None,
    ) -> None:
        self._per_layer = per_layer
        self._embedding_name = embedding_name
        self._head_name = head_name
        self._vocab_size = vocab_size
        self._collectives = collectives
        mine = collectives.parallel
        self._is_shared = mine.tp_size > 1
        self.tokens = token_ranges(vocab_size, mine.tp_size)[mine.tp_rank]
        self._shape = (len(self.tokens) + self._is_shared, hidden_size)
        self._tied = tied
        self._embeds = embeds
        self._heads = heads
        self._dtype = dtype
        self._ops = ops
        self._samples_on_host = isinstance(ops, SamplingOperations)
        self._packing = ops.weight_packing(dtype)
        self._softcap = softcap
        self._logits_divisor = logits_divisor
        self._embedding_scale = (
            None
            if embedding_scale is None
            else torch.tensor(embedding_scale, dtype=dtype, device=ops.device)
        )
        self._loaded: dict[str, WeightPart] = {}
        self._embedding: torch.Tensor | LinearWeight | None = None
        self._head: LinearWeight | None = None

    def placements(self) -> Placements:
        takes_embedding = self._embeds or (self._heads and self._tied)
        names = [self._embedding_name] * takes_embedding + [self._head_name] * self._heads
        placements = {name: self._placement(name) for name in names}
        return placements | (self._per_layer.placements() if self._per_layer else {})

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [] if self._per_layer is None else [self._per_layer.projection]

    @property
    def optional_names(self) -> frozenset[str]:
        """Names of tensors that the checkpoint may leave out."""
        return frozenset({self._head_name} if self._tied else ())

    def finish_loading(self) -> None:
        """Settle the head once every tensor has come.

        As in transformers, a head in the checkpoint of a tied model counts where it differs."""
        if not (self._embeds or self._heads):
            return
        embedding = self._loaded.pop(self._embedding_name, None)
        head = self._loaded.pop(self._head_name, embedding)
        if embedding is None:  # another stage has it
            embedding = head
        assert embedding is not None and head is not None
        if self._tied and head is not embedding and _are_equal(head, embedding):
            head = embedding
        if self._packing is None:
            assert isinstance(embedding, torch.Tensor) and isinstance(head, torch.Tensor)
            self._head = self._ops.prepare_linear(head) if self._heads else None
            self._embedding = embedding
            return
        packed = self._pack(self._packing, self._embedding_name, embedding)
        is_shared = head is embedding
        self._head = packed if is_shared else self._pack(self._packing, self._head_name, head)
        self._embedding = packed

    def rows_of(self, token_ids_T: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        """Ids in [0, V) -> what `embed` and `begin` take. `given`: as there."""
        if self._per_layer is not None:
            self._per_layer.look_up(token_ids_T, given)
        if not self._is_shared:
            return token_ids_T
        rows_T = token_ids_T - self.tokens.start
        is_elsewhere_T = (rows_T < 0) | (rows_T >= len(self.tokens))
        return rows_T.masked_fill_(is_elsewhere_T, len(self.tokens))

    def embed(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Answers of `rows_of` -> [T, E]."""
        assert self._embedding is not None, "finish_loading was not called"
        hidden_TE = self._ops.embedding(rows_T, self._embedding)
        if self._is_shared:
            hidden_TE = self._ops.reduce(hidden_TE, self._collectives.all_reduce_)
        if self._embedding_scale is not None:
            hidden_TE = hidden_TE.mul_(self._embedding_scale)
        return hidden_TE

    def begin(self, rows_T: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        """What enters the first layer, [T, E]; what each layer has of its own is made of it.
        `rows_T`: answers of `rows_of`. `given`: what takes the place of embeddings."""
        hidden_TE = self._ops.replace_rows(self.embed(rows_T), given)
        if self._per_layer is not None:
            self._per_layer.begin(hidden_TE)
        return hidden_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V], or of this rank's tokens; softcap included. float32, but of the model's
        dtype where the device samples and all logits are here."""
        assert self._head is not None, "finish_loading was not called"
        logits_RV = self._ops.linear(hidden_RE, self._head)
        if self._is_shared:
            logits_RV = logits_RV[:, : len(self.tokens)]
        if self._logits_divisor != 1.0:
            logits_RV = logits_RV / self._logits_divisor
        if self._softcap is not None:
            logits_RV = (logits_RV / self._softcap).tanh_().mul_(self._softcap)
        if self._is_shared or self._samples_on_host:
            logits_RV = logits_RV.float()
        if self._is_shared and not self._samples_on_host:
            return gather_logits(logits_RV, self._vocab_size, self._collectives)
        return logits_RV

    def _placement(self, name: str) -> AnyPlacement:
        if self._packing is None:
            return Placement(self._shape, partial(self._store, name))
        return PackedPlacement(self._shape, partial(self._loaded.__setitem__, name), False)

    def _store(self, name: str, tensor: torch.Tensor, copy: CopyWeight) -> None:
        own = torch.empty(self._shape, dtype=self._dtype, device=self._ops.device)
        copy(own, tensor)
        self._loaded[name] = own

    @staticmethod
    def _pack(packing: WeightPacking, name: str, part: WeightPart) -> LinearWeight:
        return packing.pack(name, [part], least_bits=_LEAST_BITS)


def gather_logits(
    logits_RV: torch.Tensor, vocab_size: int, collectives: Collectives
) -> torch.Tensor:
    """Each rank's logits of its own tokens -> those of all tokens, [R, `vocab_size`]."""
    mine = collectives.parallel
    sizes = [len(tokens) for tokens in token_ranges(vocab_size, mine.tp_size)]
    padded_RV = torch.nn.functional.pad(logits_RV, (0, max(sizes) - sizes[mine.tp_rank]))
    shards = collectives.all_gather(padded_RV)
    return torch.cat([shard[:, :size] for shard, size in zip(shards, sizes, strict=True)], dim=1)


def _are_equal(one: WeightPart, other: WeightPart) -> bool:
    """Whether both hold the same numbers. Unlike types are not compared."""
    if isinstance(one, QuantisedTensor) and isinstance(other, QuantisedTensor):
        return one.type_name == other.type_name and all(
            torch.equal(one.ordered()[name], other.ordered()[name]) for name in one.arrays
        )
    if isinstance(one, QuantisedTensor) or isinstance(other, QuantisedTensor):
        return False
    return torch.equal(one, other)
