"""Ranks that run one model together, and what they tell each other while they compute.

Alone imports torch.distributed. Must not know models, plans or sockets."""
