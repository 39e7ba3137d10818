"""`engine-core simulate` of a checkout that is not installed. See docs/guides/simulator.md"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core.errors import ConfigurationError
from frontend.simulator.command import app
from scripts.command_line import run_app

main = functools.partial(run_app, app, refused=(ConfigurationError,))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
