"""Where log lines go."""

import logging
import sys


def log_to_stderr(level: str) -> None:
    """Replaces what was set before. `level`: a name such as "info"."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
