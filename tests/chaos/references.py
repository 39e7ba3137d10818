"""What every case gives on an engine that nothing disturbs."""

import asyncio
import dataclasses
from typing import Any

from frontend import AsyncLLM
from tests.chaos.cases import Case
from tests.chaos.requests import Use, run_request


async def compute_references(address: str, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """For each case its sequences."""
    async with AsyncLLM(address) as llm:
        answers = await asyncio.gather(*(run_request(llm, case, Use()) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        assert not answer.problems and answer.num_ends == 1, (case, answer)
    return [[dataclasses.asdict(sequence) for sequence in answer.sequences] for answer in answers]
