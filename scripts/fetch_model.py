"""Fetch a known model into the cache and print its path, alone, on standard output.

    path=$(python scripts/fetch_model.py smollm2)

Progress goes to standard error. Exit code 1 with one line there when it cannot be fetched.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core.model_files.download import (
    describe_known_models,
    fetch_known_model,
    find_known_model,
)
from engine_core.model_files.errors import ModelFilesError
from scripts.command_line import make_app, run_app
from scripts.load.report import log

app = make_app("fetch_model", f"{__doc__}\n{describe_known_models('')}")


@app.default
def fetch(name: str) -> int:
    """Fetch a known model."""
    model = find_known_model(name)
    if model is None:
        raise ModelFilesError(f"{name!r} is not a known model; {describe_known_models(name)}")
    print(fetch_known_model(model, report=log))
    return 0


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(ModelFilesError,)))
