"""From a plan to sampled tokens: persistent batch, step inputs, forward pass, sampling.

The same for every model; what differs between models lives in engine_core.models.
"""
