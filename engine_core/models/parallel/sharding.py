"""One rank's part of a decoder: the shapes of its layers, and what it takes of a checkpoint.

q, k, v, gate, up   rows (outputs), whole heads     o, down       columns (inputs), at block borders
embedding, head     rows (tokens), then zeros       recurrent     as `SharedRows` says
experts             some of them, or all as gate, up and down     the rest      whole"""

import dataclasses
import re
from collections.abc import Collection

import torch

from engine_core.distributed.parallel import Parallel
from engine_core.layers.config import ExpertConfig, HeadRows, RecurrentConfig, SharedRows
from engine_core.layers.vocabulary import token_ranges
from engine_core.models.config import ModelConfig
from engine_core.models.errors import ModelConfigError, ModelWeightsError
from engine_core.models.layer_cache import (
    KeysAndState,
    Latent,
    LayerCache,
    NoCache,
    PagedKeys,
    State,
    recurrent_state,
)
from kernels.interface.weights import QuantisedTensor, WeightPart

_EXPERT = re.compile(r".+\.experts\.(?P<number>\d+)\.\w+\.(?:weight|bias)")
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<rest>.+)")
_GATE_AND_UP = frozenset({"gate_proj", "up_proj", "w1", "w3"})
_DOWN = frozenset({"down_proj", "w2"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
_OUTPUTS = frozenset({"o_proj.weight", "out_proj.weight"})
"""A mixer's products that sum over heads."""
_KINDS = ("weight", "bias")
_MOST_SIZES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Elements of a dimension of `size`, in ranges that follow one another, then `num_zeros` rows
    of zeros."""

    dim: int
    ranges: tuple[range, ...]
    size: int
    num_zeros: int = 0

    @property
    def width(self) -> int:
        """Elements of all ranges."""
        return sum(map(len, self.ranges))


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
        self._parallel, self._whole = parallel, config
        self._intermediate = _share(config.intermediate_size, parallel, block_inputs)
        recurrent = None if config.recurrent is None else config.recurrent.shared_by(size)
        experts = next((each for each in config.experts if each is not None), None)
        self._experts: range | None = None
        self._of_expert: Cut | None = None
        self._of_shared: Cut | None = None
        self._shared_name = "" if experts is None else experts.shared_name
        if experts is not None and experts.shared_size is not None:
            self._of_shared = _share(experts.shared_size, parallel, block_inputs)
        if experts is not None and by_expert and not experts.num_experts % size:
            number = experts.num_experts // size
            self._experts = range(rank * number, (rank + 1) * number)
        elif experts is not None:
            self._of_expert = _share(experts.intermediate_size, parallel, block_inputs)
        tokens = token_ranges(config.spec.vocab_size, size)[rank]
        # one row of zeros at least: that of all other ranks' tokens
        self._tokens = Cut(
            0, (range(tokens.start, tokens.stop),), config.spec.vocab_size, num_zeros=1
        )
        self.config = dataclasses.replace(
            config,
            spec=dataclasses.replace(
                config.spec,
                num_query_heads=config.spec.num_query_heads // size,
                layers=tuple(_kept(each, recurrent, size) for each in config.spec.layers),
            ),
            recurrent=recurrent,
            intermediate_size=self._intermediate.width,
            experts=tuple(self._part_of(each) for each in config.experts),
        )

    def _part_of(self, experts: ExpertConfig | None) -> ExpertConfig | None:
        if experts is None:
            return None
        if self._of_shared is not None:
            experts = dataclasses.replace(experts, shared_size=self._of_shared.width)
        if (cut := self._of_expert) is None:
            return dataclasses.replace(experts, here=self._experts)
        return dataclasses.replace(experts, intermediate_size=cut.width)

    def takes(self, name: str) -> bool:
        """Whether any of a tensor is this rank's."""
        match = _EXPERT.fullmatch(name)
        return match is None or self._experts is None or int(match["number"]) in self._experts

    def take(self, name: str, part: WeightPart) -> WeightPart:
        """The rank's part of a checkpoint's tensor, by its name here; shares memory where it can.
        Raises ModelWeightsError: the tensor is not as large as the config says."""
        cut = self.cut(name)
        if cut is None:
            is_whole = self._experts is not None and _EXPERT.fullmatch(name)
            is_summed = not is_whole and name.endswith(
                (".o_proj.bias", ".down_proj.bias", ".out_proj.bias")
            )
            if is_summed and self._parallel.tp_rank and isinstance(part, torch.Tensor):
                return torch.zeros_like(part)  # each rank's product is added: the bias once
            return part
        if len(part.shape) <= cut.dim or part.shape[cut.dim] != cut.size:
            raise ModelWeightsError(
                f"tensor {name} has shape {list(part.shape)}, config.json asks for {cut.size} in "
                f"dimension {cut.dim}; the two belong to different models"
            )
        if isinstance(part, QuantisedTensor):
            blocks = _taken_blocks(part, cut)
            if blocks is not None:
                return blocks
            part = part.dequantise()
        taken = [part.narrow(cut.dim, each.start, len(each)) for each in cut.ranges]
        if cut.num_zeros:
            taken.append(taken[0].new_zeros(cut.num_zeros, *taken[0].shape[1:]))
        return taken[0] if len(taken) == 1 else torch.cat(taken, cut.dim)

    def whole(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor of which the rank's part has this shape."""
        cut = self.cut(name)
        return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])

    def cut(self, name: str) -> Cut | None:
        """The cut that gives a rank its part of a checkpoint's tensor; None: it is taken whole."""
        layer, kind = name.split(".")[-2:]
        if layer in _VOCABULARY:
            return self._tokens
        if (cut := self._of_mixer(name)) is not None:
            return cut
        features: Cut | None = self._intermediate
        if self._of_shared is not None and f".{self._shared_name}." in name:
            features = self._of_shared
        if _EXPERT.fullmatch(name):
            features = self._of_expert
        if features is not None and layer in _DOWN and kind == "weight":
            return dataclasses.replace(features, dim=1)
        return features if layer in _GATE_AND_UP else None

    def _of_mixer(self, name: str) -> Cut | None:
        """The rank's heads of a tensor of attention or of a recurrent layer; None: another one."""
        if (found := _LAYER.fullmatch(name)) is None:
            return None
        rows: SharedRows = {}
        kept = self._whole.spec.layers[int(found["layer"])]
        if isinstance(kept, Latent) and found["part"] == "self_attn":
            assert self._whole.latent is not None
            rows = self._whole.latent.shared_rows
        elif isinstance(kept, PagedKeys) and found["part"] == "self_attn":
            rows = _rows_of_attention(kept, self._whole.spec.num_query_heads)
        elif isinstance(kept, State | KeysAndState) and self._whole.recurrent is not None:
            rows = self._whole.recurrent.shared_rows
        ranges, end = [], 0
        for heads in rows.get(found["rest"], ()):
            first = self._parallel.tp_rank * heads.num_heads // self._parallel.tp_size
            number = max(1, heads.num_heads // self._parallel.tp_size)
            ranges.append(range(end + first * heads.size, end + (first + number) * heads.size))
            end += heads.num_heads * heads.size
        dim = 1 if found["rest"] in _OUTPUTS else 0
        return Cut(dim, tuple(ranges), end) if ranges else None


def _rows_of_attention(keys: PagedKeys, num_query_heads: int) -> SharedRows:
    queries, outputs = (
        HeadRows(num_query_heads, size) for size in (keys.key_size, keys.value_size)
    )
    rows = {
        "q_proj": queries,
        "gate": outputs,
        "g_proj": HeadRows(num_query_heads),
        "k_proj": HeadRows(keys.num_kv_heads, keys.key_size),
        "v_proj": HeadRows(keys.num_kv_heads, keys.value_size),
    }
    each = {f"{name}.{kind}": (heads,) for name, heads in rows.items() for kind in _KINDS}
    return {**each, "o_proj.weight": (outputs,), "sinks": (HeadRows(num_query_heads),)}


def _kept(kept: LayerCache, recurrent: RecurrentConfig | None, size: int) -> LayerCache:
    """The part that one of so many ranks keeps of this."""
    state = None if recurrent is None else recurrent_state(recurrent.shape)
    if isinstance(kept, PagedKeys):
        kept = dataclasses.replace(kept, num_kv_heads=max(1, kept.num_kv_heads // size))
        if state is None or not isinstance(kept, KeysAndState):
            return kept
        return dataclasses.replace(kept, state=state)
    return kept if state is None or not isinstance(kept, State) else state


def _taken_blocks(part: QuantisedTensor, cut: Cut) -> QuantisedTensor | None:
    """The rank's part in blocks; None: the type or its blocks cannot be cut so."""
    first = cut.ranges[0]
    if len(cut.ranges) == 1:
        return part.narrow(cut.dim, first.start, first.stop, num_zeros=cut.num_zeros)
    if cut.dim == 0 and part.has_rows:
        return part.rows(torch.cat([torch.arange(each.start, each.stop) for each in cut.ranges]))
    if cut.dim == 1 and part.arrays.keys() != {"blocks"}:
        return None
    pieces = [part.narrow(cut.dim, each.start, each.stop) for each in cut.ranges]
    there = [piece.arrays for piece in pieces if piece is not None]
    if len(there) < len(pieces):
        return None
    # inputs, or outputs of arrays that have inputs first
    arrays = {name: torch.cat([each[name] for each in there], 1) for name in part.arrays}
    shape = (part.shape[0], cut.width) if cut.dim else (cut.width, part.shape[1])
    return dataclasses.replace(part, shape=shape, arrays=arrays)


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
    shared = NoCache if config.recurrent is None else (NoCache, State)
    for kept in config.spec.layers:
        if isinstance(kept, PagedKeys):
            if kept.num_kv_heads % size and size % kept.num_kv_heads:
                return f"{kept.num_kv_heads} key/value heads"
        elif size > 1 and not isinstance(kept, shared):
            return f"layers that keep {type(kept).__name__}"
    for name, parts in () if config.recurrent is None else config.recurrent.shared_rows.items():
        for number in (heads.num_heads for heads in parts):
            if number % size and (name in _OUTPUTS or size % number):
                return f"{number} heads or channels of recurrent layers"
    experts = [each for each in config.experts if each is not None]
    widths = [config.intermediate_size, *(each.intermediate_size for each in experts)]
    widths += [each.shared_size for each in experts if each.shared_size is not None]
    if min(widths) < size:
        return f"a feed-forward of {min(widths)}"
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
    return Cut(0, (range(start, stop),), size)
