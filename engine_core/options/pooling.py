"""Options of embeddings, classes and scores, by vLLM's names."""

import dataclasses
from typing import Annotated, Any, Literal, TypedDict

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import MODEL


class PoolerFields(TypedDict, total=False):
    """Fields of --pooler-config."""

    pooling_type: str
    seq_pooling_type: str
    tok_pooling_type: str
    use_activation: bool
    step_tag_id: int
    returned_token_ids: list[int]


class Overrides(TypedDict, total=False):
    """Fields of --hf-overrides."""

    architectures: list[str]
    classifier_from_token: list[str]
    id2label: dict[str, str]
    is_matryoshka: bool
    is_original_qwen3_reranker: bool
    jina_task: str
    matryoshka_dimensions: list[int]
    method: Literal["no_post_processing", "from_2_way_softmax"]
    num_labels: int
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"]


@Parameter(name="*", group=MODEL.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOptions:
    runner: Annotated[Literal["auto", "generate", "pooling"], MODEL] = "auto"
    """generate: text; pooling: vectors, classes and scores; auto: as the model was made for."""
    convert: Annotated[Literal["auto", "none", "embed", "classify"], MODEL] = "auto"
    """What a model for text is served as too, or with --runner pooling instead."""
    pooler_config: Annotated[str | None, MODEL] = None
    """JSON such as '{"pooling_type": "MEAN", "use_activation": false}', before the model's own."""
    hf_overrides: Annotated[str | None, MODEL] = None
    """JSON of fields of config.json that say how hidden states are pooled, such as
    '{"is_matryoshka": true}'."""

    @property
    def pooler_fields(self) -> dict[str, Any]:
        """Raises ConfigurationError."""
        return _object("--pooler-config", self.pooler_config, PoolerFields)

    @property
    def overrides(self) -> dict[str, Any]:
        """Raises ConfigurationError."""
        return _object("--hf-overrides", self.hf_overrides, Overrides)


def _object(option: str, text: str | None, kind: Any) -> dict[str, Any]:
    if text is None:
        return {}
    import msgspec  # --help is there without it

    try:
        fields = msgspec.json.decode(text)
        names = kind.__annotations__
        if isinstance(fields, dict) and (unknown := sorted(fields.keys() - names.keys())):
            raise ConfigurationError(
                f"{option}: {', '.join(unknown)} is not supported; there is {', '.join(names)}"
            )
        return dict(msgspec.convert(fields, kind))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{option} is {text}: {error}; correct it") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}; quote it as a whole") from error
