"""Proof, on a machine without a GPU, that every kernel compiles well for the target GPU."""
