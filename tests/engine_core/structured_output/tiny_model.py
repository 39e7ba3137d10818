"""A random Llama that writes bytes and some words, as a folder; with markers of reasoning."""

import json

from tests.engine_core.structured_output.vocabularies import VOCAB_SIZE, tokenizer_json

START, END = VOCAB_SIZE - 3, VOCAB_SIZE - 2
"""Added tokens that are not special, as Qwen's: <think> and </think>."""


def write_tiny_model(folder, *, chat_template="{{ messages[-1].content }}", seed=0):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    document = json.loads(tokenizer_json())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"unused {number}": number for number in range(len(vocabulary), START)}
    marker = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"] += [
        {"id": START, "content": "<think>", **marker},
        {"id": END, "content": "</think>", **marker},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    about["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
