"""What `scripts/compare_budgets.py` counts, and how it serves a trace on real daemons."""
