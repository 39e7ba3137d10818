from collections.abc import Iterator

import pytest

from tests.engine_core.distributed.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Four processes for all tests of several ranks."""
    with RankProcesses(4) as processes:
        yield processes
