"""Scripts are no installed package: the tests find them, and their own parts, by path."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parents[2]), str(_HERE)]
