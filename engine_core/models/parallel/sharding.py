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
from engine_core.models.layer_cache import PagedKeys
from kernels.interface.weights import QuantisedTensor, WeightPart

_EXPERT = re.compile(r".+\.experts\.(?P<number>\d+)\.\w+\.weight")
_LAYER = re.compile(r"\blayers\.(?P<layer>\d+)\.")
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
        self._parallel, self._whole = parallel, config.spec
        self._intermediate = _share(config.intermediate_size, parallel, block_inputs)
        experts = next((each for each in config.experts if each is not None), None)
        self._experts: range | None = None
        self._of_expert: Cut | None = None
        if experts is not None and by_expert and not experts.num_experts % size:
            number = experts.num_experts // size
            self._experts = range(rank * number, (rank + 1) * number)
        elif experts is not None:
            self._of_expert = _share(experts.intermediate_size, parallel, block_inputs)
        tokens = token_ranges(config.spec.vocab_size, size)[rank]
        # one row of zeros at least: that of all other ranks' tokens
        self._tokens = Cut(0, tokens.start, tokens.stop, config.spec.vocab_size, num_zeros=1)
        self.config = dataclasses.replace(
            config,
            spec=dataclasses.replace(
                config.spec,
                num_query_heads=config.spec.num_query_heads // size,
                layers=tuple(
                    dataclasses.replace(keys, num_kv_heads=max(1, keys.num_kv_heads // size))
                    for keys in map(config.spec.keys_of, range(config.spec.num_layers))
                ),
            ),
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
            if is_summed and self._parallel.tp_rank and isinstance(part, torch.Tensor):
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
        """Shape of the whole tensor of which the rank's part has this shape."""
        cut = self.cut(name)
        return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])

    def cut(self, name: str) -> Cut | None:
        """The cut that gives a rank its part of a checkpoint's tensor; None: it is taken whole."""
        layer, kind = name.split(".")[-2:]
        if layer in _VOCABULARY:
            return self._tokens
        if layer in ("q_proj", "k_proj", "v_proj"):
            return self._heads(name, layer)
        if layer == "o_proj" and kind == "weight":
            return dataclasses.replace(self._heads(name, layer), dim=1)
        features = self._of_expert if _EXPERT.fullmatch(name) else self._intermediate
        if features is not None and layer in _DOWN and kind == "weight":
            return dataclasses.replace(features, dim=1)
        return features if layer in _GATE_AND_UP else None

    def _heads(self, name: str, projection: str) -> Cut:
        """The rank's heads of a projection of the layer that the tensor's name has."""
        found = _LAYER.search(name)
        assert found is not None, f"{name} is of no layer"
        keys = self._whole.keys_of(int(found["layer"]))
        is_query = projection in ("q_proj", "o_proj")
        size = keys.value_size if projection in ("v_proj", "o_proj") else keys.key_size
        total = self._whole.num_query_heads if is_query else keys.num_kv_heads
        first = self._parallel.tp_rank * total // self._parallel.tp_size
        number = max(1, total // self._parallel.tp_size)
        return Cut(0, first * size, (first + number) * size, total * size)


def allowed_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks that can share the layers, rising."""
    return [size for size in range(1, _MOST_SIZES + 1) if not _obstacle(config, size)]


def _obstacle(config: ModelConfig, size: int) -> str:
    """Why so many ranks cannot share the layers; empty: they can."""
    heads = config.spec.num_query_heads
    if size > 1 and not config.can_be_shared:
        return "layers of this family"
    if heads % size:
        return f"{heads} attention heads"
    if size > 1 and any(each is not None and each.shared_size for each in config.experts):
        return "experts that all tokens go through"
    for keys in config.spec.layers:
        if not isinstance(keys, PagedKeys):
            if size > 1:
                return "layers without keys"
        elif keys.num_kv_heads % size and size % keys.num_kv_heads:
            return f"{keys.num_kv_heads} key/value heads"
    widths = [each.intermediate_size for each in config.experts if each is not None]
    if min([config.intermediate_size, *widths]) < size:
        return f"a feed-forward of {min([config.intermediate_size, *widths])}"
    return f"{config.spec.vocab_size} tokens" if config.spec.vocab_size < size else ""


def _check_heads(config: ModelConfig, size: int) -> None:
    if why := _obstacle(config, size):
        allowed = ", ".join(map(str, allowed_sizes(config)))
        raise ModelConfigError(
            f"--tensor-parallel-size {size}: {why} cannot be shared by {size} ranks; use one of "
            f"{allowed}"
        )


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
