"""`engine-client bench`, or with `compare` first that, of a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend.cli.app import run_command_line

if __name__ == "__main__":
    typed = sys.argv[1:]
    sys.exit(run_command_line(typed if typed[:1] == ["compare"] else ["bench", *typed]))
