"""Embeddings per layer (Gemma 3n, Gemma 4): a second table gives each token inputs of every layer.

inputs = (norm(project(embedding)) + sqrt(P) table[token]) / sqrt(2)    [T, L * P], P a layer
h += norm(up(activation(down(h)) * inputs of the layer))                at a layer's end

The table is as large as half of a model, and a token needs a row of it: on a CPU it stays where it
was read from, mapped from its file, in the file's format; a GPU reads rows of a page-locked copy in
the host's memory."""

from collections.abc import Sequence

import torch

from engine_core.layers.config import Activation, PerLayerConfig
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import PackedPlacement, Placements, merge
from kernels.interface.operations import Operations
from kernels.interface.special_inputs import GivenRows
from kernels.interface.weights import QuantisedTensor, WeightPart


class PerLayerInputs:
    """See the module. Rows are read in the middle of a pass: its tokens may be the device's alone.
    `norm`: of a layer's part. `num_layers`: of the model."""

    def __init__(
        self,
        config: PerLayerConfig,
        num_layers: int,
        hidden_size: int,
        *,
        norm: RMSNorm,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._sizes = [config.size] * num_layers
        self._shape = (config.vocab_size, num_layers * config.size)
        self._given_token = config.given_token
        self._dtype = dtype
        self._norm = norm
        self._ops = ops
        self.projection = FusedLinear(
            [("model.per_layer_model_projection", self._shape[1])],
            hidden_size,
            bias=False,
            dtype=dtype,
            ops=ops,
        )
        self._scale = torch.tensor(hidden_size**-0.5)
        self._half = torch.tensor(2.0**-0.5)
        self._table: WeightPart | None = None
        self._ids_T = torch.empty(0, dtype=torch.int64)
        self._inputs: Sequence[torch.Tensor] = ()

    def placements(self) -> Placements:
        table = PackedPlacement(self._shape, self._store, may_be_quantised=False)
        own: Placements = {"model.embed_tokens_per_layer.weight": table}
        return merge([own, self.projection.placements(), self._norm.placements()])

    def _store(self, part: WeightPart) -> None:
        self._table = None  # that of the weights before: two would be half of a model each
        self._table = self._ops.row_table(part, self._dtype)

    def look_up(self, token_ids_T: torch.Tensor, given: GivenRows | None) -> None:
        """The tokens of the pass that comes, and which of them are given as states. Those that the
        table lacks count as the first one."""
        if given is not None:
            token_ids_T = token_ids_T.index_fill(0, given.places_N, self._given_token)
        is_there_T = (token_ids_T >= 0) & (token_ids_T < self._shape[0])
        self._ids_T = token_ids_T.where(is_there_T, 0)

    def begin(self, embedded_TE: torch.Tensor) -> None:
        """Make the inputs of all layers from the tokens' embeddings, [T, E]."""
        x_TN = self.projection(embedded_TE).mul_(self._scale)
        parts = x_TN.split(self._sizes, 1)  # type: ignore[no-untyped-call]
        x_TN = torch.cat([self._norm(part_TP) for part_TP in parts], 1)
        x_TN = self._ops.reduce(x_TN, self._add_rows).mul_(self._half)
        self._inputs = x_TN.split(self._sizes, 1)  # type: ignore[no-untyped-call]

    def of(self, layer: int) -> torch.Tensor:
        """[T, P], of the pass that has begun."""
        return self._inputs[layer]

    def _add_rows(self, x_TN: torch.Tensor) -> torch.Tensor:
        table, ids_T = self._table, self._ids_T
        assert table is not None and len(ids_T) == len(x_TN), "no table, or another pass's tokens"
        if isinstance(table, QuantisedTensor):
            rows_TN = table.rows(ids_T).dequantise()
        else:
            rows_TN = table.index_select(0, ids_T)
        return x_TN.add_(rows_TN.to(x_TN.dtype), alpha=self._sizes[0] ** 0.5)


class LayerInputAdder:
    """What a layer adds of its inputs to the hidden state. `name`: checkpoint prefix of the
    layer. `norm`: of what is added."""

    def __init__(
        self,
        name: str,
        size: int,
        hidden_size: int,
        *,
        activation: Activation,
        norm: RMSNorm,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        def linear(part: str, outputs: int, inputs: int) -> FusedLinear:
            return FusedLinear(
                [(f"{name}.{part}", outputs)], inputs, bias=False, dtype=dtype, ops=ops
            )

        self._down = linear("per_layer_input_gate", size, hidden_size)
        self._up = linear("per_layer_projection", hidden_size, size)
        self._activation: Activation = activation
        self._norm = norm
        self._ops = ops

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self._down, self._up]

    def placements(self) -> Placements:
        return merge([each.placements() for each in (self._down, self._up, self._norm)])

    def __call__(self, x_TE: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """(hidden states, the layer's inputs) -> [T, E]."""
        gate_TP = self._ops.activate(self._down(x_TE), self._activation)
        return self._norm(self._up(self._ops.gate(gate_TP, input_TP, None)))
