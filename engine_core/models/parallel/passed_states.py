"""The states that pass from a stage of a pipeline to the next one."""

import torch

from engine_core.distributed.collectives import Collectives
from kernels.interface.operations import Operations

_LEAST_CAPACITY = 64


class PassedStates:
    """The residual stream and what the stage's last layer adds to it, [T, E] each: their sum is
    the next layer's, as if no stage ended there."""

    def __init__(
        self,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        self._stage = collectives.parallel.pp_rank
        self._received = torch.empty(2, 0, hidden_size, dtype=dtype, device=device)
        """[2, capacity, E]: where the pass finds them, which may keep addresses."""

    @property
    def capacity(self) -> int:
        """Tokens; if it has grown, the addresses are new."""
        return self._received.shape[1]

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Wait for those of the step -> int64 [T], where `rows` finds them.
        Raises CollectiveError: the stage before this one is lost."""
        if num_tokens > self.capacity:
            capacity = max(_LEAST_CAPACITY, 1 << (num_tokens - 1).bit_length())
            self._received = self._received.new_empty(2, capacity, self._received.shape[2])
        came = self._received.new_empty(2, num_tokens, self._received.shape[2])
        self._received[:, :num_tokens] = self._collectives.recv(came, self._stage - 1)
        return torch.arange(num_tokens, device=came.device)

    def rows(self, places_T: torch.Tensor, ops: Operations) -> tuple[torch.Tensor, torch.Tensor]:
        """What `receive` returned -> (what is added, the residual stream), for a captured pass."""
        added_CE, residual_CE = self._received
        return ops.embedding(places_T, added_CE), ops.embedding(places_T, residual_CE)

    def send(self, added_TE: torch.Tensor, residual_TE: torch.Tensor) -> None:
        """Raises CollectiveError: the stage behind this one is lost."""
        self._collectives.send(torch.stack((added_TE, residual_TE)), self._stage + 1)
