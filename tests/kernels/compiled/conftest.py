"""The option that writes the table of compiled kernels anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-kernel-table",
        action="store_true",
        help="write docs/benchmarks/kernels_sm90.json instead of comparing with it",
    )
