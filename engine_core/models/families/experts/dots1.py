"""dots.llm1: Qwen 3's attention and DeepSeek's experts."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_qwen_windows
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.dense import qwen3
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata

_DEFAULTS = {
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    windows = read_qwen_windows(fields.with_values({"use_sliding_window": True}))
    config = read_decoder(
        fields,
        default_max_position=2048,
        sliding_windows=windows,
        experts=read_deepseek_experts(fields),
    )
    biased = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=biased, output_bias=biased, block=qwen3.block)


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {
        **gguf.deepseek_experts(meta),
        "sliding_window": None,  # llama.cpp has none
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
    }


FAMILIES = (
    Family(
        names=("Dots1ForCausalLM", "Dots1Model"),
        model_type="dots1",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="dots1",
            layer=gguf.LLAMA | gguf.QK_NORMS | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERTS,
            fields=_gguf_fields,
        ),
    ),
)
