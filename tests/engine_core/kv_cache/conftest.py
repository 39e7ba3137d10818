"""Makes `paged_memory` importable, whatever the folder that pytest was started in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
