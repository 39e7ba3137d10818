"""Scripts are no installed package: the tests find them by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
