"""What a step is made of: prefill and decode mixed, or one at a time."""

from engine_core.scheduler.compositions.composition import Composition
from engine_core.scheduler.compositions.mixed import Mixed
from engine_core.scheduler.compositions.prefill_first import PrefillFirst

__all__ = ["Composition", "Mixed", "PrefillFirst"]
