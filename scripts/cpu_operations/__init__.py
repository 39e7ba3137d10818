"""Parts of `scripts/bench_cpu_operations.py`: what it times, and how it reads the clock."""
