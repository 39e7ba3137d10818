"""What a policy may read of a request, and no more."""

import dataclasses

from engine_core.scheduler.request import RequestStatus


@dataclasses.dataclass(eq=False)
class PolicyRequest:
    request_id: str
    priority: int = 0
    arrival_time: float = 0.0
    tenant: str | None = None
    client_index: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_prompt_tokens: int = 1
    num_tokens: int = 1
    num_sequences: int = 1
    sequences: tuple = ()

    @property
    def message(self) -> "PolicyRequest":
        """Priority and tenant."""
        return self

    @property
    def tenant_name(self) -> str:
        return (self.tenant or "").partition("/")[0]

    def __repr__(self) -> str:
        return f"{self.request_id}:{self.status.name}"


def by_id(*requests: PolicyRequest) -> dict[str, PolicyRequest]:
    return {request.request_id: request for request in requests}


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def drain(queue) -> list[str]:
    return [queue.pop_request().request_id for _ in range(len(queue))]
