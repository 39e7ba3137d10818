"""The option that writes the table of compiled kernels anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-kernel-table",
        action="store_true",
        help="write docs/benchmarks/kernels_*.json instead of comparing with it",
    )
    parser.addoption(
        "--every-gpu",
        action="store_true",
        help="compile all kernels for sm_80, 86, 89, 100 and 120, too; half an hour",
    )
