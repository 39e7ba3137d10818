"""Tiny random encoder-decoder models of every family, as folders."""

import torch
import transformers

IDS = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    **IDS,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 70,
    "decoder_start_token_id": 2,
    "init_std": 0.3,
}
T5 = {
    "vocab_size": 131,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "d_model": 40,
    "d_kv": 8,
    "d_ff": 50,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "n_positions": 160,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
CONFIGS = {
    "bart": lambda: transformers.BartConfig(**BART, max_position_embeddings=160),
    "mbart": lambda: transformers.MBartConfig(
        **BART, max_position_embeddings=160, scale_embedding=True
    ),
    "marian": lambda: transformers.MarianConfig(
        **BART, max_position_embeddings=160, activation_function="swish"
    ),
    "pegasus": lambda: transformers.PegasusConfig(**BART, max_position_embeddings=160),
    "t5": lambda: transformers.T5Config(**T5),
    "t5 1.1": lambda: transformers.T5Config(
        **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": lambda: transformers.MT5Config(
        **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "whisper": lambda: transformers.WhisperConfig(
        **BART,
        max_source_positions=50,
        max_target_positions=160,
        num_mel_bins=20,
        begin_suppress_tokens=[7, 2],
        suppress_tokens=[11, 13],
    ),
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
    """(path, transformers' model)."""
    torch.manual_seed(3)
    model = getattr(transformers, CLASSES[family])(CONFIGS[family]()).eval()
    for name, parameter in model.named_parameters():  # nothing alike, nothing at rest
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(path)
    return path, model


def encoder_input(family, length):
    """One input, as the encoder takes it, without a dimension for a batch."""
    generator = torch.Generator().manual_seed(length)
    if family == "whisper":
        return {"input_features": torch.randn(20, 100, generator=generator)}
    return {"input_ids": torch.randint(3, 131, (length,), generator=generator)}
