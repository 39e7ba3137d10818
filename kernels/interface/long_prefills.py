"""Short chunks of prompts behind long prefixes: what a GPU splits the keys of."""

import numpy as np
import numpy.typing as npt

LONG_SEQUENCE = 1024
MOST_SPLIT_ROWS = 8192
"""Query tokens times query heads."""


def is_long_prefill(
    num_queries_R: npt.NDArray[np.int64], seq_lens_R: npt.NDArray[np.int64], num_query_heads: int
) -> npt.NDArray[np.bool_]:
    """Of each request, whether its few queries see so many keys that a GPU may split these."""
    is_short_R = (num_queries_R > 1) & (num_queries_R * num_query_heads <= MOST_SPLIT_ROWS)
    return is_short_R & (seq_lens_R > LONG_SEQUENCE)
