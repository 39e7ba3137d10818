"""Encoder-decoder models: transformers' weights and encoder, our decoder over the paged cache."""
