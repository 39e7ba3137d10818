"""Block hashes of text that requests share, computed once and not once a request.

The cache hashes what a sequence does not bring along; these are its own function's values, so what
is found, registered and evicted stays the cache's decision. Knows no engine.
"""

import functools
from array import array

from engine_core.kv_cache.prefix_cache import extend_block_hashes, root_hash
from scripts.simulator.trace import TraceRequest, is_shared

_MAX_TEXTS = 16_384


def shared_block_hashes(request: TraceRequest, block_size: int) -> tuple[bytes, ...]:
    """Of the full blocks in the prompt's first run of text, if others share it: mostly a system
    prompt. None of what follows it, of which the hashes depend on all before."""
    if not request.context or not is_shared(request.context[0]):
        return ()
    return _hashes(*request.context[0], block_size)


@functools.lru_cache(maxsize=_MAX_TEXTS)
def _hashes(token_id: int, num_tokens: int, block_size: int) -> tuple[bytes, ...]:
    hashes: list[bytes] = []
    num_full = num_tokens // block_size * block_size
    tokens = (array("I", (token_id,)) * num_full).tobytes()
    extend_block_hashes(hashes, root_hash(adapter=None, cache_salt=None), tokens, block_size)
    return tuple(hashes)
