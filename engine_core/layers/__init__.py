"""Parts that models are made of: each takes its weights by name and computes through `Operations`.

Must not know a model's architecture, the runner or where tensors come from.
"""
