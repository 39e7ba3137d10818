"""Prompts' KV blocks from engine to engine: messages, the threads that send and fetch them.

Knows neither scheduler nor model: blocks are bytes under a hash."""

from engine_core.block_transfer.fetches import Fetches
from engine_core.block_transfer.memory import BlockMemory
from engine_core.block_transfer.store import TransferStore

__all__ = ["BlockMemory", "Fetches", "TransferStore"]
