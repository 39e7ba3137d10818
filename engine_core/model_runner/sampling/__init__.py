"""From logits to tokens: what each request asked for, and how it is carried out."""

from engine_core.model_runner.sampling.sampler import SampledTokens, Sampler
from engine_core.model_runner.sampling.state import SamplingState

__all__ = ["SampledTokens", "Sampler", "SamplingState"]
