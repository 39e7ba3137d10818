"""Tiny random encoder-decoder models of every family, as folders."""

import json

import torch
import transformers
from published_configs import PUBLISHED

BART = {
    "vocab_size": 131,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 70,
    "decoder_start_token_id": 2,
    "init_std": 0.3,
    "max_position_embeddings": 160,
}
CLASSES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "t5 1.1": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


def make_folder(family, path):
    """(path, transformers' model), with the very config.json of a published model and no
    generation config: what transformers writes has more keys."""
    path.mkdir(exist_ok=True)
    config_json = path / "config.json"
    config_json.write_text(json.dumps(PUBLISHED[family]))
    model = save(CLASSES[family], transformers.AutoConfig.from_pretrained(path), path)
    config_json.write_text(json.dumps(PUBLISHED[family]))
    (path / "generation_config.json").unlink(missing_ok=True)
    return path, model


def make_plain_bart(path):
    """The same of a model whose config asks for nothing at generation."""
    return path, save(CLASSES["bart"], transformers.BartConfig(**BART), path)


def save(class_name, config, path):
    torch.manual_seed(3)
    model = getattr(transformers, class_name)(config).eval()
    for name, parameter in model.named_parameters():  # nothing alike, nothing at rest
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(path)
    return model


def encoder_input(family, length):
    """One input, as the encoder takes it, without a dimension for a batch."""
    generator = torch.Generator().manual_seed(length)
    if family == "whisper":
        return {"input_features": torch.randn(20, 100, generator=generator)}
    return {"input_ids": torch.randint(3, 131, (length,), generator=generator)}
