"""Decoders with experts, of which each token takes a few."""
