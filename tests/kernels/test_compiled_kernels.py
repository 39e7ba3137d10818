"""Every kernel compiles for the GPU without spilling, and no worse than the committed table says.

Needs no GPU: the GPU machine's triton is fetched once (scripts/fetch_compiler.py). After a kernel
was changed on purpose, write the table anew:

    PYTHONPATH=$(python scripts/fetch_compiler.py) python scripts/compile_kernels.py \\
        --json docs/benchmarks/kernels_sm90.json
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.fetch_compiler import compiler_environment, fetch_compiler  # noqa: E402


@pytest.mark.timeout(1800)  # a minute or two where triton's cache is empty
def test_every_kernel_compiles_for_sm90_as_well_as_the_table_says():
    done = subprocess.run(
        [
            sys.executable,
            "scripts/compile_kernels.py",
            "--check",
            "docs/benchmarks/kernels_sm90.json",
        ],
        cwd=ROOT,
        env=compiler_environment(fetch_compiler()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
