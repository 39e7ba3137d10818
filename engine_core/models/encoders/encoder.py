"""The encoder that BERT, RoBERTa, MPNet, DeBERTa and ModernBERT share: every difference between
the families is an option of EncoderConfig. A layer, with norms behind the sums and before:

    hidden = norm(hidden + attention(hidden))      hidden += attention(norm(hidden))
    hidden = norm(hidden + feed_forward(hidden))   hidden += feed_forward(norm(hidden))
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine_core.layers.attention import Attention
from engine_core.layers.disentangled_attention import DisentangledAttention, DistanceEmbeddings
from engine_core.layers.distance_bias import DistanceBias
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import LayerNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from engine_core.layers.rotary import rotary_rows
from engine_core.models.encoders.encoder_configs import EncoderConfig, HeadConfig
from engine_core.models.interface import Feature
from kernels.interface.operations import AttentionParams, ForwardContext, Operations, RotaryParams

AnyNorm = LayerNorm | RMSNorm
MakeNorm = Callable[..., AnyNorm]
"""Makes the norm of a prefix in a checkpoint, perhaps of another `size`."""


class EncoderFeedForward:
    """`down(activation(up(x)))`; gated: `down(activation(left half) * right half)` of up."""

    def __init__(self, config: EncoderConfig, layer: int, linear: partial[FusedLinear]) -> None:
        size, names = config.intermediate_size, config.names
        width = size * (1 + config.gated) // len(names.up)
        parts = [(name.format(layer), width) for name in names.up]
        self.up = linear(parts, config.spec.hidden_size, bias=config.up_bias)
        down = [(names.down.format(layer), config.spec.hidden_size)]
        self.down = linear(down, size, bias=config.down_bias)
        self._activation, self._gated = config.activation, config.gated

    def __call__(self, x_TE: torch.Tensor, ops: Operations) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        up_TF = self.up(x_TE)
        if not self._gated:
            return self.down(ops.activate(up_TF, self._activation))
        if self._activation == "gelu":
            return self.down(ops.gelu_and_mul(up_TF))
        is_silu = self._activation == "silu"
        return self.down((ops.silu_and_mul if is_silu else ops.gelu_tanh_and_mul)(up_TF))


class EncoderHead:
    """See HeadConfig. Its weights stay float: a label feels every error."""

    def __init__(
        self, config: HeadConfig, linear: partial[FusedLinear], norm: AnyNorm | None, size: int
    ) -> None:
        self.config = config
        self._norm = norm
        exact = partial(linear, least_bits=32)
        self._dense = None
        if config.dense is not None:
            self._dense = exact([(config.dense, size)], size, bias=config.dense_bias)
        self._out = exact([(config.out, config.num_labels)], size, bias=True)

    def placements(self) -> Placements:
        parts = (self._dense, self._norm, self._out)
        return merge(part.placements() for part in parts if part is not None)

    def __call__(self, x_RE: torch.Tensor, ops: Operations) -> torch.Tensor:
        """[R, E] -> float32 logits [R, labels]."""
        if self._dense is not None:
            x_RE, activation = self._dense(x_RE), self.config.activation
            x_RE = x_RE.tanh_() if activation == "tanh" else ops.activate(x_RE, activation)
        if self._norm is not None:
            x_RE = self._norm(x_RE)
        return self._out(x_RE).float()


class EncoderLayer:
    """Attention and feed-forward, and two norms, the first of which a family may lack."""

    def __init__(
        self,
        config: EncoderConfig,
        layer: int,
        *,
        linear: partial[FusedLinear],
        norm: MakeNorm,
        angles_PD: torch.Tensor,
        bias_HN: torch.Tensor | None,
        distances: DistanceEmbeddings | None,
    ) -> None:
        names, size, keys = config.names, config.spec.hidden_size, config.spec.keys_of(layer)
        inner = config.spec.num_query_heads * keys.key_size
        width = 3 * inner // len(names.qkv)
        make: Callable[..., Attention] = partial(Attention, layer)
        if (how := config.disentangled) is not None:
            parts = [(name.format(layer), size) for name in how.projections]
            assert distances is not None
            own = linear(parts, size, bias=config.attention_bias) if parts else None
            make = partial(DisentangledAttention, layer, distances=distances, projections=own)
        self.attention = make(
            qkv=linear(
                [(name.format(layer), width) for name in names.qkv],
                size,
                bias=config.attention_bias,
            ),
            output=linear(
                [(names.attention_output.format(layer), size)], inner, bias=config.attention_bias
            ),
            head_norms=[],
            rotary=RotaryParams(
                num_query_heads=config.spec.num_query_heads,
                head_size=keys.key_size,
                cos_sin_PD=angles_PD,
            ),
            params=AttentionParams(
                scale=config.attention_scale or keys.key_size**-0.5,
                sliding_window=keys.window,
                distance_bias_HN=bias_HN,
            ),
        )
        self.feed_forward = EncoderFeedForward(config, layer, linear)
        # before the first layer may stand the norm of the embedding
        has_first = layer > 0 or not config.pre_norm or names.embedding_norm is None
        self.attention_norm = norm(names.attention_norm.format(layer)) if has_first else None
        self.output_norm = norm(names.output_norm.format(layer))

    def placements(self) -> Placements:
        parts = [self.attention.placements(), self.output_norm.placements()]
        parts += [self.feed_forward.up.placements(), self.feed_forward.down.placements()]
        if self.attention_norm is not None:
            parts.append(self.attention_norm.placements())
        return merge(parts)


class Encoder:
    """Hidden states of whole sequences, which see all of themselves; implements
    `engine_core.models.interface.Model`. Keys and values live for one layer.

    `num_positions`: most tokens of a sequence. A position of `forward` is that of the token in its
    sequence, plus `num_positions` times its type."""

    supports: frozenset[Feature] = frozenset()
    stage = None
    """All of its layers are here."""

    def __init__(
        self, config: EncoderConfig, *, dtype: torch.dtype, ops: Operations, num_positions: int
    ) -> None:
        self.config, self.spec = config, config.spec
        self.num_positions = num_positions
        self.dtype = dtype
        self._ops = ops
        size, names, device = config.spec.hidden_size, config.names, ops.device
        width = config.embedding_size or size
        linear = partial(FusedLinear, dtype=dtype, ops=ops)
        make: MakeNorm = RMSNorm if config.rms_norm else partial(LayerNorm, bias=config.norm_bias)
        norm = partial(make, size=size, eps=config.norm_eps, dtype=dtype, ops=ops)

        def table(name: str, num_rows: int) -> Parameter:
            return Parameter(f"{name}.weight", (num_rows, width), dtype, device=device)

        self._words = table(names.words, config.spec.vocab_size)
        self._tables: list[Parameter] = []
        """Tables of positions and of token types, until `finish_loading` joins them."""
        if names.positions is not None:
            num_rows = config.first_position + config.spec.max_model_len
            self._tables.append(table(names.positions, num_rows))
        if names.token_types is not None:
            self._tables.append(table(names.token_types, config.num_token_types))
        self._places_PE: torch.Tensor | None = None
        """What a position adds to a word, a row for each token type and position."""
        self._embedding_norm: AnyNorm | None = None
        if names.embedding_norm is not None:
            self._embedding_norm = norm(names.embedding_norm, size=width)
        self._projection: FusedLinear | None = None
        if names.embedding_projection is not None:
            self._projection = linear([(names.embedding_projection, size)], width, bias=True)
        self._distances: DistanceEmbeddings | None = None
        if (how := config.disentangled) is not None:
            rows, rows_norm = how.names
            self._distances = DistanceEmbeddings(
                rows,
                span=how.span,
                size=size,
                max_distance=how.max_distance,
                reach=num_positions - 1,
                norm=None if rows_norm is None else norm(rows_norm),
                dtype=dtype,
                device=device,
            )
        self._distance_bias: DistanceBias | None = None
        if names.distance_bias is not None:
            self._distance_bias = DistanceBias(
                f"{names.distance_bias}.weight",
                num_buckets=config.num_distance_buckets,
                num_heads=config.spec.num_query_heads,
                device=device,
            )
        bias_HN = None if self._distance_bias is None else self._distance_bias.bias_HN
        tables = {
            rotary: rotary_rows(rotary, 0, num_positions, dtype)
            .to(device)
            .repeat(config.num_token_types, 1)
            for rotary in set(config.rotary)
            if rotary is not None
        }
        unturned = torch.empty(
            num_positions * config.num_token_types, 0, dtype=dtype, device=device
        )
        layers = {
            layer: EncoderLayer(
                config,
                layer,
                linear=linear,
                norm=norm,
                angles_PD=unturned if rotary is None else tables[rotary],
                bias_HN=bias_HN,
                distances=self._distances,
            )
            for layer, rotary in enumerate(config.rotary)
            if not config.weights_of_layers or layer in config.weights_of_layers
        }
        self._layers = [layers[own] for own in config.weights_of_layers or layers]
        self._final_norm = norm(names.final_norm) if names.final_norm is not None else None
        self.head: EncoderHead | None = None
        if config.head is not None:
            head_norm = None if config.head.norm is None else norm(config.head.norm)
            self.head = EncoderHead(config.head, linear, head_norm, size)
        self._forward = ops.capture(self._compute, lends=True)

    @property
    def optional_names(self) -> frozenset[str]:
        """Names of the tensors that the checkpoint may leave out: none."""
        return frozenset()

    def placements(self) -> Placements:
        """Every tensor that the model takes, by checkpoint name."""
        parts = [table.placements() for table in (self._words, *self._tables)]
        parts += [layer.placements() for layer in dict.fromkeys(self._layers)]
        others = (self._embedding_norm, self._projection, self._distance_bias, self._distances)
        last = (*others, self._final_norm, self.head)
        return merge([*parts, *(part.placements() for part in last if part is not None)])

    def finish_loading(self) -> None:
        """Join what positions and token types add to a word: a row for each pair."""
        config = self.config
        if self._distance_bias is not None:
            self._distance_bias.finish_loading()
        for layer in self._layers:
            if isinstance(layer.attention, DisentangledAttention):
                layer.attention.finish_loading(self._ops)
        if not self._tables:
            return
        *positions, last = (part.tensor for part in self._tables)
        if config.names.token_types is None:
            positions, last = [last], torch.zeros_like(last[:1])
        rows_CPE = last[:, None].expand(-1, self.num_positions, -1)
        first = config.first_position
        for table_PE in positions:
            rows_CPE = rows_CPE + table_PE[first : first + self.num_positions]
        self._places_PE = rows_CPE.flatten(0, 1).contiguous()
        self._tables = []

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states, which hold until the next call."""
        return self._forward(token_ids_T, positions_T, context)

    def _compute(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """What `forward` consists of; `Operations.capture` says what it may do."""
        ops = self._ops
        words_TE = ops.embedding(token_ids_T, self._words.tensor)
        if self._embedding_norm is None:
            hidden_TE = words_TE
        elif self._places_PE is None:
            hidden_TE = self._embedding_norm(words_TE)
        else:
            places_TE = ops.embedding(positions_T, self._places_PE)
            hidden_TE = self._embedding_norm.add(words_TE, places_TE)[0]
        if self._projection is not None:
            hidden_TE = self._projection(hidden_TE)
        if self.config.pre_norm:
            return self._compute_pre_norm(hidden_TE, positions_T, context)
        for layer in self._layers:
            assert layer.attention_norm is not None
            out_TE = layer.attention(hidden_TE, positions_T, context)
            hidden_TE = layer.attention_norm.add(out_TE, hidden_TE)[0]
            out_TE = layer.feed_forward(hidden_TE, ops)
            hidden_TE = layer.output_norm.add(out_TE, hidden_TE)[0]
        return hidden_TE

    def _compute_pre_norm(
        self, residual_TE: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        x_TE = residual_TE
        for number, layer in enumerate(self._layers):
            if layer.attention_norm is not None:
                if number:
                    x_TE, residual_TE = layer.attention_norm.add(x_TE, residual_TE)
                else:
                    x_TE = layer.attention_norm(residual_TE)
            x_TE = layer.attention(x_TE, positions_T, context)
            x_TE, residual_TE = layer.output_norm.add(x_TE, residual_TE)
            x_TE = layer.feed_forward(x_TE, self._ops)
        assert self._final_norm is not None
        return self._final_norm.add(x_TE, residual_TE)[0]

    def label(self, x_E: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits of one state [E], or of tokens [N, E]."""
        x_RE = torch.from_numpy(np.atleast_2d(x_E)).to(self._ops.device, self.dtype)
        logits: npt.NDArray[np.float32] = self.compute_logits(x_RE).cpu().numpy()
        return logits if x_E.ndim == 2 else logits[0]

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits of the labels, [R, labels]."""
        assert self.head is not None, "the model has no head"
        return self.head(hidden_RE, self._ops)
