"""Kernels that make tokens and log-probabilities of logits."""
