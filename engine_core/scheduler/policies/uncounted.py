"""What a policy answers that serves everybody alike: nobody's tokens are counted."""

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.request import Request


class NoServiceAccounting:
    """The part of a SchedulingPolicy that is about service, for policies that keep no count."""

    @property
    def counts_service(self) -> bool:
        return False

    def joined(self, request: Request) -> int:
        """All requests are one tenant's."""
        return 0

    def left(self, request: Request) -> None:
        """Nothing to forget."""

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Nothing to count."""

    def decoded(self, num_tokens_by_tenant: npt.NDArray[np.int64]) -> None:
        """Nothing to count."""

    def service_by_tenant(self) -> dict[str, float]:
        return {}
