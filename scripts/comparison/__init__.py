"""Parts of the comparison with other engines: what is asked, of whom, by whom, and what came of it.

`scripts/compare_engines.py` runs them.
"""
