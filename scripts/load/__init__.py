"""Parts of the load test: what to send, when, what came of it. `scripts/load_test.py` runs it."""
