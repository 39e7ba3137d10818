"""What a step is made of: prefill and decode mixed, or one at a time."""

from engine_core.scheduler.batching.mixed import MixedBatching
from engine_core.scheduler.batching.policy import BatchingPolicy
from engine_core.scheduler.batching.prefill_first import PrefillFirstBatching

__all__ = ["BatchingPolicy", "MixedBatching", "PrefillFirstBatching"]
