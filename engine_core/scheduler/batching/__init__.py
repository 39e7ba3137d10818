"""What a step is made of: prefill and decode mixed, or one at a time."""

from engine_core.scheduler.batching.mixed import MixedBatching
from engine_core.scheduler.batching.policy import BatchingPolicy
from engine_core.scheduler.batching.prefill_first import PrefillFirstBatching
from engine_core.scheduler.config import SchedulerConfig

__all__ = ["BatchingPolicy", "MixedBatching", "PrefillFirstBatching", "make_batching"]


def make_batching(config: SchedulerConfig) -> BatchingPolicy:
    """The batching policy that `config.batching` names."""
    if config.batching == "mixed":
        return MixedBatching()
    return PrefillFirstBatching(config.prefill_delay_factor)
