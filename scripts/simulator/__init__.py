"""Parts of the simulator: the production scheduler and cache, run in virtual time by a trace and a
step-time model instead of a model runner. `scripts/simulate.py` runs it. No part knows a clock.
"""
