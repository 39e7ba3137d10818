"""Prefix blocks on disk, for the next start: files, and the threads that read and write them.

Knows neither scheduler nor model: blocks are bytes under a hash."""

from engine_core.prefix_store.block_files import BlockFiles, BrokenBlock, UnsafeFolder
from engine_core.prefix_store.store import PrefixStore

__all__ = ["BlockFiles", "BrokenBlock", "PrefixStore", "UnsafeFolder"]
