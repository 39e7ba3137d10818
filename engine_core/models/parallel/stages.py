"""The layers of each stage of a pipeline."""

import dataclasses
from functools import cache

from engine_core.models.config import ModelConfig
from engine_core.models.errors import ModelConfigError
from engine_core.models.layer_cache import PagedKeys


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Contiguous layers of a model. The first stage embeds, the last one has norm and head."""

    layers: range
    num_layers: int
    """Layers of the whole model."""

    @classmethod
    def whole(cls, config: ModelConfig) -> "Stage":
        """All layers."""
        return cls(range(config.spec.num_layers), config.spec.num_layers)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    def takes(self, name: str) -> bool:
        """Whether a tensor may be its own, by the name in our own spelling."""
        kind, _, rest = name.removeprefix("model.").partition(".")
        if kind == "layers":
            layer = rest.partition(".")[0]
            return not layer.isdecimal() or int(layer) in self.layers
        return self.is_first if kind == "embed_tokens" else self.is_last


def split_layers(config: ModelConfig, num_stages: int) -> tuple[Stage, ...]:
    """Stages whose dearest one is as cheap as can be. A part costs what a decode reads for a token:
    a layer's weights (of experts those that a token takes) and the head's, a row of the embedding.
    Raises ModelConfigError: a stage would have no layer."""
    if not 1 <= num_stages <= config.spec.num_layers:
        raise ModelConfigError(
            f"--pipeline-parallel-size is {num_stages}, and the model has {config.spec.num_layers} "
            "layers, of which each stage needs one; lower it"
        )
    readers = [layer for layer in config.spec.layers if getattr(layer, "shares", None) is not None]
    if num_stages > 1 and readers:
        raise ModelConfigError(
            f"--pipeline-parallel-size is {num_stages}, and {len(readers)} layers read other "
            "layers' keys, which no other stage has; omit it"
        )
    if num_stages > 1 and config.latent is not None and config.latent.top_k:
        shared = [kept for kept in config.spec.layers if not getattr(kept, "index_size", 0)]
        if shared:
            raise ModelConfigError(
                f"--pipeline-parallel-size is {num_stages}, and {len(shared)} layers attend keys "
                "that other layers choose, which no other stage knows; omit it"
            )
    if num_stages > 1 and config.per_layer is not None:
        raise ModelConfigError(
            f"--pipeline-parallel-size is {num_stages}, and each layer has embeddings of the "
            "tokens, which the first stage alone knows; omit it"
        )
    if num_stages == 1:
        return (Stage.whole(config),)
    costs = [_layer_cost(config, layer) for layer in range(config.spec.num_layers)]
    costs[0] += config.spec.hidden_size
    costs[-1] += config.spec.vocab_size * config.spec.hidden_size

    @cache
    def best(start: int, num_left: int) -> tuple[int, tuple[int, ...]]:
        """The dearest of so many stages from this layer on, and where they end."""
        if num_left == 1:
            return sum(costs[start:]), (config.spec.num_layers,)
        choices = []
        for stop in range(start + 1, config.spec.num_layers - num_left + 2):
            dearest, stops = best(stop, num_left - 1)
            choices.append((max(sum(costs[start:stop]), dearest), (stop, *stops)))
        return min(choices)

    stops = best(0, num_stages)[1]
    starts = (0, *stops[:-1])
    return tuple(
        Stage(range(start, stop), config.spec.num_layers)
        for start, stop in zip(starts, stops, strict=True)
    )


def _layer_cost(config: ModelConfig, layer: int) -> int:
    keys, cost = config.spec.layers[layer], 4 * config.spec.hidden_size**2
    if isinstance(keys, PagedKeys):
        heads = 2 * config.spec.num_query_heads + 2 * keys.num_kv_heads
        cost = config.spec.hidden_size * keys.key_size * heads
    experts = config.experts[layer]
    if experts is None:
        return cost + 3 * config.spec.hidden_size * config.intermediate_size
    active = experts.top_k * experts.intermediate_size
    return cost + config.spec.hidden_size * (3 * active + experts.num_experts)
