"""The trace that `--trace` writes: every arrival, step and time, and its reader."""
