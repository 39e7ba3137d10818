"""GGUF files: header, tensors, configuration, tokenizer."""
