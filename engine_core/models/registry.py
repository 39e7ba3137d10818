"""Which of our models runs an architecture. One that is not here may still run through
transformers, which is why it is an error of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    HeadConfig,
    bert_head,
    distilbert_head,
    modernbert_head,
    modernbert_token_head,
    read_bert,
    read_distilbert,
    read_modernbert,
    read_roberta,
    roberta_head,
    token_head,
)
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS, QWEN_EXPERTS, ExpertNaming
from engine_core.models.family_configs import (
    read_gemma3,
    read_llama,
    read_llava,
    read_mistral,
    read_mixtral,
    read_qwen2,
    read_qwen3,
    read_qwen3_moe,
)

ReadEncoder = Callable[[ConfigFields], EncoderConfig]
ReadHead = Callable[[ConfigFields], HeadConfig]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read and build one architecture.

    Attributes:
        tensor_prefixes: (prefix in checkpoints, prefix that the model uses), first match counts.
        ignored_prefixes: tensors of parts that we leave out, such as a vision tower.
        tensor_suffixes: as `tensor_prefixes`, at the end.
        experts: how its checkpoints name experts, if it has any.
        text_config: the fields are in the config's "text_config".
    """

    model_type: str
    read_config: Callable[[ConfigFields], ModelConfig | EncoderConfig]
    tensor_prefixes: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    tensor_suffixes: tuple[tuple[str, str], ...] = ()
    text_config: bool = False
    experts: ExpertNaming | None = None


_LLAVA_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_LLAVA_TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def _qwen_vl(model_type: str) -> Architecture:
    return Architecture(
        model_type,
        read_qwen2,
        tensor_prefixes=(("model.language_model.", "model."),),
        ignored_prefixes=("visual.", "model.visual."),
        text_config=True,
    )


def _idefics3(model_type: str) -> Architecture:
    return Architecture(
        model_type,
        read_llama,
        tensor_prefixes=(("model.text_model.", "model."),),
        ignored_prefixes=("model.vision_model.", "model.connector."),
        text_config=True,
    )


_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", read_llama),
    "MistralForCausalLM": Architecture("mistral", read_mistral),
    "Qwen2ForCausalLM": Architecture("qwen2", read_qwen2),
    "Qwen3ForCausalLM": Architecture("qwen3", read_qwen3),
    "MixtralForCausalLM": Architecture("mixtral", read_mixtral, experts=MIXTRAL_EXPERTS),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", read_qwen3_moe, experts=QWEN_EXPERTS),
    "Gemma3ForCausalLM": Architecture("gemma3_text", read_gemma3),
    # of multimodal models the text part; both the hub's prefixes and those of transformers 5
    "Qwen2VLForConditionalGeneration": _qwen_vl("qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl("qwen2_5_vl"),
    "Idefics3ForConditionalGeneration": _idefics3("idefics3"),
    "SmolVLMForConditionalGeneration": _idefics3("smolvlm"),
    "LlavaForConditionalGeneration": Architecture(
        "llava",
        read_llava,
        tensor_prefixes=_LLAVA_PREFIXES,
        ignored_prefixes=_LLAVA_TOWER,
        text_config=True,
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3",
        read_gemma3,
        tensor_prefixes=_LLAVA_PREFIXES,
        ignored_prefixes=_LLAVA_TOWER,
        text_config=True,
    ),
}

for _name, _architecture in list(_ARCHITECTURES.items()):
    _stem = _name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    _stem += "Text" if _architecture.model_type == "gemma3_text" else ""
    for _ending in ("Model", "ForSequenceClassification"):  # `startup/pooled_files.py` has the head
        _ARCHITECTURES[f"{_stem}{_ending}"] = _architecture
for _name in ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"):
    _ARCHITECTURES[_name] = _ARCHITECTURES["Qwen2ForCausalLM"]

_GAMMA_AND_BETA = (
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
)
"""Of BERT's first checkpoints."""


def _add_encoders(
    prefix: str,
    model_type: str,
    read: ReadEncoder,
    head: ReadHead,
    own_token_head: ReadHead = token_head,
    *,
    base: str,
    unused: tuple[str, ...],
) -> None:
    """A family: the bare model, and those with a head for masked words (which embed as the bare
    one), for sequences and for tokens.

    Args:
        base: what the bare model's tensors are prefixed with where there is a head.
        unused: prefixes, with and without `base`, of what only training needs.
    """

    def entry(read_head: ReadHead | None, *left_out: str) -> Architecture:
        def with_head(fields: ConfigFields) -> EncoderConfig:
            config = read(fields)
            return config if read_head is None else replace(config, head=read_head(fields))

        prefixes = tuple(start + name for name in left_out for start in ("", base))
        return Architecture(
            model_type,
            with_head,
            tensor_prefixes=((base, ""),),
            ignored_prefixes=prefixes,
            tensor_suffixes=_GAMMA_AND_BETA,
        )

    _ARCHITECTURES[f"{prefix}Model"] = entry(None, *unused)
    _ARCHITECTURES[f"{prefix}ForMaskedLM"] = entry(None, *unused)
    _ARCHITECTURES[f"{prefix}ForSequenceClassification"] = entry(head)
    _ARCHITECTURES[f"{prefix}ForTokenClassification"] = entry(own_token_head, "pooler.")


_add_encoders(
    "Bert", "bert", read_bert, bert_head, base="bert.", unused=("pooler.", "cls.", "classifier.")
)
for _prefix, _type in (
    ("Roberta", "roberta"),
    ("XLMRoberta", "xlm-roberta"),
    ("Camembert", "camembert"),
):
    _unused = ("pooler.", "lm_head.", "classifier.")
    _add_encoders(_prefix, _type, read_roberta, roberta_head, base="roberta.", unused=_unused)
_add_encoders(
    "DistilBert",
    "distilbert",
    read_distilbert,
    distilbert_head,
    base="distilbert.",
    unused=("vocab_",),
)
_add_encoders(
    "ModernBert",
    "modernbert",
    read_modernbert,
    modernbert_head,
    modernbert_token_head,
    base="model.",
    unused=("head.", "decoder."),
)

SUPPORTED_ARCHITECTURES = tuple(sorted(_ARCHITECTURES))


def find_architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The (name, entry) for a config: by "architectures", or by "model_type" if it has none.

    Raises:
        UnsupportedArchitecture: neither is known here.
        ModelConfigError: "architectures" is no list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"config: architectures is {names!r}, it must be a list of names")
    for name in names:
        if name in _ARCHITECTURES:
            return name, _ARCHITECTURES[name]
    if not names:
        for name, architecture in _ARCHITECTURES.items():
            if architecture.model_type == config.get("model_type"):
                return name, architecture
    wanted = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    raise UnsupportedArchitecture(
        f"architecture {wanted} has no native code; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def read_model_config(config: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """Resolve the dictionary of a config.json, of a decoder or an encoder.

    Raises:
        UnsupportedArchitecture: the architecture, or an option of it, has no exact code here.
        ModelConfigError: a field is missing or impossible.
    """
    _, architecture = find_architecture(config)
    if not architecture.text_config:
        return architecture.read_config(ConfigFields(config))
    # the hub's Qwen2-VL has no part of its own for it
    text = ConfigFields(config).mapping("text_config") or config
    tied = config.get("tie_word_embeddings")
    return architecture.read_config(
        ConfigFields(text if tied is None else {**text, "tie_word_embeddings": tied})
    )
