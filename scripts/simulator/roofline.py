"""Step times by arithmetic: what the hardware can do at best, from the model's shapes.

    time = overhead + max(weights read, dense products) + max(cache read, attention products)
                    + blocks copied to or from host memory

The output layer counts for sampled tokens only, embeddings are looked up and not read. Products
count two operations a weight and a token, attention four a query head, a pair and an element of
its head.
"""

import dataclasses

from scripts.simulator.errors import SimulationError
from scripts.simulator.step_work import StepWork


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    flops: float
    """Of a dense product, a second."""
    memory_bandwidth: float
    """Bytes a second."""
    memory_bytes: float
    host_bandwidth: float
    """Bytes a second between device and host memory."""
    overhead_s: float = 0.0
    """Of each step, besides what the formula says."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    bytes_per_weight: float = 2
    bytes_per_cache_element: float = 2

    @property
    def num_layer_weights(self) -> int:
        """Of all layers; norms are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.num_query_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def num_output_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def cache_bytes_per_token(self) -> float:
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * self.bytes_per_cache_element

    @property
    def attention_operations_per_pair(self) -> int:
        return 4 * self.num_layers * self.num_query_heads * self.head_dim


class Roofline:
    """A StepModel. `block_size` is that of the cache, in tokens."""

    def __init__(self, hardware: Hardware, shape: ModelShape, block_size: int) -> None:
        self._hardware = hardware
        self._shape = shape
        self._block_bytes = shape.cache_bytes_per_token * block_size
        weights = shape.num_layer_weights + shape.num_output_weights
        self._read_s = weights * shape.bytes_per_weight / hardware.memory_bandwidth
        self._token_s = 2 * shape.num_layer_weights / hardware.flops
        self._sample_s = 2 * shape.num_output_weights / hardware.flops
        self._context_s = shape.cache_bytes_per_token / hardware.memory_bandwidth
        self._pair_s = shape.attention_operations_per_pair / hardware.flops
        self._copy_s = self._block_bytes / hardware.host_bandwidth

    def duration_s(self, work: StepWork) -> float:
        copies_s = self._hardware.overhead_s + work.num_copied_blocks * self._copy_s
        if not work.num_tokens:
            return copies_s
        dense_s = work.num_tokens * self._token_s + work.num_sampled * self._sample_s
        cache_s = work.num_context_tokens * self._context_s
        return (
            copies_s
            + max(self._read_s, dense_s)
            + max(cache_s, work.num_attention_pairs * self._pair_s)
        )

    def num_blocks(self, memory_share: float = 0.9) -> int:
        """Blocks that fit beside the weights (embeddings included) into this share of the memory.

        Raises:
            SimulationError: not even one block fits.
        """
        shape = self._shape
        num_weights = shape.num_layer_weights + 2 * shape.num_output_weights
        free = self._hardware.memory_bytes * memory_share - num_weights * shape.bytes_per_weight
        if free < self._block_bytes:
            raise SimulationError(
                f"{shape.name} leaves {free / 1e9:.1f} GB of {self._hardware.name}'s memory, a "
                f"block needs {self._block_bytes / 1e9:.4f}; choose a smaller model"
            )
        return int(free // self._block_bytes)

    def describe(self) -> dict[str, object]:
        return {
            "model": "roofline",
            "hardware": dataclasses.asdict(self._hardware),
            "shape": dataclasses.asdict(self._shape),
        }


_H200 = Hardware("h200", 790e12, 4.3e12, 139 * 2**30, 50e9)
_CPU = Hardware("cpu-2", 123e9, 17e9, 4 * 2**30, 7.5e9)
HARDWARE = {hardware.name: hardware for hardware in (_H200, _CPU)}
SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 4, 4),
    )
}


def preset(name: str, table: dict[str, object], option: str) -> object:
    """
    Raises:
        SimulationError: names what there is.
    """
    if name not in table:
        raise SimulationError(f"{option} is {name!r}, it must be one of {', '.join(table)}")
    return table[name]
