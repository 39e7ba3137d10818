"""Scripts are no installed package: the tests find them, their own parts, and the scripted engine
by path."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path[:0] = [str(_ROOT), str(_HERE), str(_ROOT / "tests" / "frontend")]
