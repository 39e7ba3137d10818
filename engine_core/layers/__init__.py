"""Parts that models are made of: each takes its weights by name and computes through `Operations`.

Must not know a model's architecture, the runner or where tensors come from."""

MAX_POSITIONS = 1 << 24
"""Most tokens of a sequence: rotary angles are computed in float32, which cannot tell the positions
behind apart."""
