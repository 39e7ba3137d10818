"""What `scripts/bench.py` measures, a file for each of its commands."""
