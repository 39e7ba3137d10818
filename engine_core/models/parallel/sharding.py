"""One rank's part of a decoder: the shapes of its layers, and what it takes of a checkpoint.

q, k, v, gate, up   rows (outputs), whole heads     o, down       columns (inputs), at block borders
embedding, head     rows (tokens), then zeros       the rest      whole
experts             some of them, or all as gate, up and down"""

import dataclasses
import re
from collections.abc import Collection

import torch

from engine_core.distributed.parallel import Parallel
from engine_core.layers.config import ExpertConfig
from engine_core.layers.vocabulary import token_ranges
from engine_core.models.config import ModelConfig
from engine_core.models.errors import ModelConfigError, ModelWeightsError
from kernels.interface.weights import QuantisedTensor, WeightPart

_EXPERT = re.compile(r".+\.experts\.(?P<number>\d+)\.\w+\.weight")
_GATE_AND_UP = frozenset({"gate_proj", "up_proj", "w1", "w3"})
_DOWN = frozenset({"down_proj", "w2"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
_MOST_SIZES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, stop) of a dimension of `size`, then `num_zeros` rows of zeros."""

    dim: int
    start: int
    stop: int
    size: int
    num_zeros: int = 0


class Sharding:
    """What a rank holds of the decoder of a config. Stages of layers are not its concern.

    Args:
        config: of the whole model.
        block_inputs: inputs of a block of the weights' formats; 1: they are floating.
        by_expert: ranks have some experts each, where their number can be shared evenly; else, a
            part of every one.

    Raises:
        ModelConfigError: so many ranks cannot share its heads; the text says how many can.

    Attributes:
        config: of the rank's part: heads, experts and feed-forward are its own, the vocabulary and
            the hidden state are the whole model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        *,
        block_inputs: Collection[int] = (1,),
        by_expert: bool = False,
    ) -> None:
        _check_heads(config, parallel.tp_size)
        rank, size = parallel.tp_rank, parallel.tp_size
        self._is_first = rank == 0
        num_kv_heads = max(1, config.num_kv_heads // size)
        first_kv_head = rank * config.num_kv_heads // size
        num_queries = config.num_query_heads // size
        self._queries = _heads(rank * num_queries, num_queries, config.num_query_heads, config)
        self._keys = _heads(first_kv_head, num_kv_heads, config.num_kv_heads, config)
        self._intermediate = _share(config.intermediate_size, parallel, block_inputs)
        experts = next((each for each in config.experts if each is not None), None)
        self._experts: range | None = None
        self._of_expert: Cut | None = None
        if experts is not None and by_expert and not experts.num_experts % size:
            number = experts.num_experts // size
            self._experts = range(rank * number, (rank + 1) * number)
        elif experts is not None:
            self._of_expert = _share(experts.intermediate_size, parallel, block_inputs)
        tokens = token_ranges(config.vocab_size, size)[rank]
        # one row of zeros at least: that of all other ranks' tokens
        self._tokens = Cut(0, tokens.start, tokens.stop, config.vocab_size, num_zeros=1)
        self.config = dataclasses.replace(
            config,
            num_query_heads=num_queries,
            num_kv_heads=num_kv_heads,
            intermediate_size=self._intermediate.stop - self._intermediate.start,
            experts=tuple(self._part_of(each) for each in config.experts),
        )

    def _part_of(self, experts: ExpertConfig | None) -> ExpertConfig | None:
        if experts is None:
            return None
        if (cut := self._of_expert) is None:
            return dataclasses.replace(experts, here=self._experts)
        return dataclasses.replace(experts, intermediate_size=cut.stop - cut.start)

    def takes(self, name: str) -> bool:
        """Whether any of a tensor is this rank's."""
        match = _EXPERT.fullmatch(name)
        return match is None or self._experts is None or int(match["number"]) in self._experts

    def take(self, name: str, part: WeightPart) -> WeightPart:
        """The rank's part of a checkpoint's tensor, by its name here; shares memory where it can.
        Raises ModelWeightsError: the tensor is not as large as the config says."""
        cut = self.cut(name)
        if cut is None:
            is_summed = name.endswith((".o_proj.bias", ".down_proj.bias"))
            if is_summed and not self._is_first and isinstance(part, torch.Tensor):
                return torch.zeros_like(part)  # each rank's product is added: the bias once
            return part
        if len(part.shape) <= cut.dim or part.shape[cut.dim] != cut.size:
            raise ModelWeightsError(
                f"tensor {name} has shape {list(part.shape)}, config.json asks for {cut.size} in "
                f"dimension {cut.dim}; the two belong to different models"
            )
        if isinstance(part, QuantisedTensor):
            blocks = part.narrow(cut.dim, cut.start, cut.stop, num_zeros=cut.num_zeros)
            if blocks is not None:
                return blocks
            part = part.dequantise()
        taken = part.narrow(cut.dim, cut.start, cut.stop - cut.start)
        if cut.num_zeros:
            taken = torch.cat([taken, taken.new_zeros(cut.num_zeros, *taken.shape[1:])])
        return taken

    def whole(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor of which the rank's part has this shape."""
        cut = self.cut(name)
        return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])

    def cut(self, name: str) -> Cut | None:
        """Of a tensor of the checkpoint; None: it is taken whole."""
        layer, kind = name.split(".")[-2:]
        if layer in _VOCABULARY:
            return self._tokens
        if layer == "q_proj":
            return self._queries
        if layer in ("k_proj", "v_proj"):
            return self._keys
        if layer == "o_proj" and kind == "weight":
            return dataclasses.replace(self._queries, dim=1)
        features = self._of_expert if _EXPERT.fullmatch(name) else self._intermediate
        if features is not None and layer in _DOWN and kind == "weight":
            return dataclasses.replace(features, dim=1)
        return features if layer in _GATE_AND_UP else None


def allowed_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks that can share the layers, rising."""
    return [size for size in range(1, _MOST_SIZES + 1) if not _obstacle(config, size)]


def _obstacle(config: ModelConfig, size: int) -> str:
    """Why so many ranks cannot share the layers; empty: they can."""
    heads, kv_heads = config.num_query_heads, config.num_kv_heads
    if heads % size:
        return f"{heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key/value heads"
    widths = [each.intermediate_size for each in config.experts if each is not None]
    if min([config.intermediate_size, *widths]) < size:
        return f"a feed-forward of {min([config.intermediate_size, *widths])}"
    return f"{config.vocab_size} tokens" if config.vocab_size < size else ""


def _check_heads(config: ModelConfig, size: int) -> None:
    if why := _obstacle(config, size):
        allowed = ", ".join(map(str, allowed_sizes(config)))
        raise ModelConfigError(
            f"--tensor-parallel-size {size}: {why} cannot be shared by {size} ranks; use one of "
            f"{allowed}"
        )


def _heads(first: int, number: int, of: int, config: ModelConfig) -> Cut:
    size = config.head_size
    return Cut(0, first * size, (first + number) * size, of * size)


def _share(size: int, parallel: Parallel, block_inputs: Collection[int]) -> Cut:
    """Whole blocks, nearly as many for each rank; of the largest that give each rank one."""
    unit = max(
        each for each in {1, *block_inputs} if not size % each and size // each >= parallel.tp_size
    )
    number = size // unit
    start, stop = (
        (rank * number // parallel.tp_size) * unit
        for rank in (parallel.tp_rank, parallel.tp_rank + 1)
    )
    return Cut(0, start, stop, size)
