"""Scripts are no installed package: the tests find them, and the scripted engine, by path."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "frontend")]
