"""Messages of rank 0 and its workers, beside plans."""

from typing import Literal

import msgspec

from engine_core.kv_cache import PoolSizes
from protocol.base import Message
from protocol.errors import ErrorCode


class Joins(Message, frozen=True, tag=True):
    """A worker's first message."""

    version: str
    """The version of its code: plans have the fields of one version."""
    host: str
    """Names the machine, whatever networks call it."""
    pid: int


class Start(Message, frozen=True, tag=True):
    """Load the model."""

    rank: int
    num_workers_here: int
    """Workers on this worker's machine, rank 0 counted if it is there."""
    local_rank: int
    """The worker's number among those of its machine."""
    options: bytes
    device: str
    fingerprint: str
    """The fingerprint of the model's files."""
    rendezvous: str
    """Where ranks find each other: see `engine_core.distributed.rendezvous`."""


class Sizes(Message, frozen=True, tag=True):
    """What rank 0 has chosen; asks how much memory allows beside it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    keeps_bytes: bool
    """The KV cache is int8."""


class Serve(Message, frozen=True, tag=True):
    """Build the runner; what all ranks have room for. As an answer: what this one has."""

    num_blocks: PoolSizes
    num_host_blocks: PoolSizes
    max_model_len: int


class Change(Message, frozen=True, tag=True):
    """A call of a `ModelHost`."""

    what: Literal["release", "restore", "open", "update"]
    argument: str = ""
    """release: "weights" or ""; open: the model."""


class Probe(Message, frozen=True, tag=True):
    """Asks which step has failed since the last probe."""


class Stop(Message, frozen=True, tag=True):
    """The engine ends; or this worker is not taken."""

    why: str = ""
    """If it is not."""


class WorkerAnswer(Message, frozen=True, tag="Answer"):
    """The answer to each message of rank 0 but plans, in order."""

    serve: Serve | None = None
    text: str = ""
    refused: tuple[ErrorCode, str] | None = None
    """Why."""
    failed_step: int | None = None


class StepOutput(Message, frozen=True, tag=True):
    """The output of a step, from the last stage of several."""

    step_id: int
    output: bytes


class Failed(Message, frozen=True, tag=True):
    """A start or a step; after that of a start the worker ends."""

    why: str
    step_id: int | None = None
    is_wrong_option: bool = False


FromRank0 = Start | Sizes | Serve | Change | Probe | Stop
FromWorker = Joins | WorkerAnswer | StepOutput | Failed

to_worker = msgspec.msgpack.Decoder(FromRank0)
to_rank_0 = msgspec.msgpack.Decoder(FromWorker)
encode = msgspec.msgpack.Encoder().encode
