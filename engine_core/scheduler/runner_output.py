"""Answers of the model runner: plain data, a step each."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.batch_state import Int32Array
from protocol.outputs import Logprobs


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Speculated tokens for the next step, as columns."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclasses.dataclass(slots=True)  # one a step: frozen takes twice as long
class ModelRunnerOutput:
    """Tokens that one step sampled, as columns, and what comes with them."""

    req_ids: list[str]
    """Sequences, in any order if `sampled_token_ids` is a list, in the batch's if an array."""
    sampled_token_ids: list[list[int]] | Int32Array
    """As lists: empty while the prompt is not finished, else accepted drafts and one token more; or
    what several decode steps sampled, at least one token.
    As an array [R]: one token for each sequence of the batch; those of sequences whose prompt is
    not finished, or that have drafts, are not read. After K decode steps [R, K]: of each sequence
    as many tokens as were scheduled."""
    verified_token_ids: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    """Beside an array, by sequence with drafts: the accepted ones and one token more."""
    logprobs: dict[str, Logprobs] | None = None
    """One position a sampled token, of the sequences that asked."""
    prompt_logprobs: Mapping[str, tuple[int, Logprobs]] = dataclasses.field(default_factory=dict)
    """For sequences that asked and computed more of their prompts: the position of the first
    token, from 1 on, and columns of this and the next ones."""
    draft_token_ids: DraftTokenIds | None = None
    pooled: Mapping[str, npt.NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    """Results of pooling requests whose prompts are computed now; sampled tokens are not read."""
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """Sequences without a valid result, and why; their requests end with an error, no others."""
    refused: set[str] = dataclasses.field(default_factory=set)
    """Those of `failures` whose own parameters allow no result: no faults of the engine."""
