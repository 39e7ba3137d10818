"""A unfinished request of the scripted engine, and one step's outputs for a client."""

import dataclasses
import struct

from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs
from protocol.requests import EngineRequest


@dataclasses.dataclass
class RunningRequest:
    identity: bytes
    request: EngineRequest
    token_ids: list[list[int]]
    """Of each sequence."""
    ended: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Step:
    """What one turn brings one client: columns, objects, and who is through."""

    request_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    indexes: list[int] = dataclasses.field(default_factory=list)
    others: list[EngineCoreOutput] = dataclasses.field(default_factory=list)
    finished: list[str] = dataclasses.field(default_factory=list)

    def add(self, output: EngineCoreOutput, *, is_first: bool) -> None:
        """As the engine: a token with nothing else to say goes into the columns."""
        if is_first or output.finished or output.logprobs is not None:
            self.others.append(output)
        else:
            self.request_ids.append(output.request_id)
            self.token_ids += output.new_token_ids
            self.indexes.append(output.index)

    def message(self) -> EngineCoreOutputs:
        decoded = None
        if self.request_ids:
            decoded = DecodedTokens(
                request_ids=self.request_ids,
                token_ids=struct.pack(f"<{len(self.token_ids)}i", *self.token_ids),
                indexes=self.indexes if any(self.indexes) else None,
            )
        return EngineCoreOutputs(
            other_outputs=self.others, finished_req_ids=self.finished, decoded=decoded
        )
