"""Parts of the quality report: models by their options, and what a text's tokens cost them.

`scripts/measure_quality.py` runs them.
"""
