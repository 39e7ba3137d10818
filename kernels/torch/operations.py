"""`Operations` on a CPU through torch."""

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from kernels.interface.kv_cache import LAYER_ALIGNMENT, KVCache
from kernels.interface.lora import LoRARows, LoRAStack
from kernels.interface.operations import (
    AllReduce,
    AttentionMetadata,
    AttentionParams,
    AttentionPlanner,
    AttentionSpec,
    Forward,
    OutputRows,
    PassResult,
    take_rows,
)
from kernels.interface.sampling import SamplingLimits
from kernels.interface.special_inputs import GivenRows, PositionScores, replace_rows
from kernels.interface.weights import LinearWeight, WeightPacking, WeightPart
from kernels.torch import chosen_keys, elementwise, kv_cache, lora, recurrence, sampling
from kernels.torch.attention import PagedAttention
from kernels.torch.attention_planner import TileGroup, TilePlanner, TorchAttentionPlanner
from kernels.torch.linear import (
    linear,
    mixture_of_experts,
    prepare_experts,
    prepare_linear,
)


class TorchOperations:
    """See `kernels.interface.operations.Operations` for every method.

    Holds attention buffers, so one thread uses an instance at a time."""

    prepare_experts = staticmethod(prepare_experts)
    best_of_rows = staticmethod(sampling.best_of_rows)
    token_logprobs = staticmethod(sampling.token_logprobs)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    mean_direction = staticmethod(elementwise.mean_direction)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(elementwise.gelu_tanh_and_mul)
    gelu_and_mul = staticmethod(elementwise.gelu_and_mul)
    layer_norm = staticmethod(elementwise.layer_norm)
    add_layer_norm = staticmethod(elementwise.add_layer_norm)
    activate = staticmethod(elementwise.activate)
    rotary_and_cache = staticmethod(kv_cache.rotary_and_cache)
    write_kv_cache = staticmethod(kv_cache.write_kv_cache)
    read_kv_cache = staticmethod(kv_cache.read_kv_cache)
    view_kv_cache = staticmethod(kv_cache.view_kv_cache)
    make_block_copier = staticmethod(kv_cache.TorchBlockCopier)
    apply_penalties = staticmethod(sampling.apply_penalties)
    best_of_masked_rows = staticmethod(sampling.best_of_masked_rows)
    convolve = staticmethod(recurrence.convolve)
    recur = staticmethod(recurrence.recur)
    gated_norm = staticmethod(recurrence.gated_norm)
    gate = staticmethod(recurrence.gate)
    linear = staticmethod(linear)
    mixture_of_experts = staticmethod(mixture_of_experts)
    device = torch.device("cpu")
    needs_decodes_first = False

    def __init__(self) -> None:
        self._tiles = TilePlanner()
        self._attention = PagedAttention()

    @property
    def name(self) -> str:
        return "torch-cpu"

    @property
    def instruction_set(self) -> str:
        return torch.backends.cpu.get_cpu_capability().lower()

    @property
    def build(self) -> str:
        return f"torch-{torch.__version__}"

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def wake_threads(self) -> None:
        """They are torch's."""

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        return prepare_linear(weight_NE, bias_N)

    def weight_packing(self, dtype: torch.dtype, experts: str = "") -> WeightPacking | None:
        return None

    def input_rounding(self, weight: LinearWeight) -> None:
        """Products round what they are given."""

    def reduce(self, x_TE: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        return all_reduce(x_TE)

    def lora_rows(
        self, num_slots: int, *, max_rank: int, max_num_tokens: int, dtype: torch.dtype
    ) -> LoRARows:
        return lora.TorchLoRARows()

    def add_lora(self, out_TN: torch.Tensor, x_TE: torch.Tensor, stack: LoRAStack) -> torch.Tensor:
        assert isinstance(stack, lora.TorchLoRAStack), "made by another backend"
        return lora.add_lora(out_TN, x_TE, stack)

    def row_table(self, part: WeightPart, dtype: torch.dtype) -> WeightPart:
        return part

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        assert isinstance(weight_VE, torch.Tensor), "packed by another backend"
        return F.embedding(token_ids_T, weight_VE)

    def replace_rows(self, x_TE: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        return replace_rows(x_TE, given)

    def take_rows(self, x_TE: torch.Tensor, output: OutputRows | None) -> torch.Tensor:
        return take_rows(x_TE, output)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        positions: PositionScores | None = None,
    ) -> torch.Tensor:
        assert params.sliding_window == metadata.sliding_window, "planned for another window"
        groups = cast("tuple[TileGroup, ...]", metadata.plan)
        return self._attention.run(q_THD, k_cache, v_cache, groups, params, positions)

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        index: KVCache,
        metadata: AttentionMetadata,
        top_k: int,
    ) -> torch.Tensor:
        return chosen_keys.choose_keys(q_THD, weights_TH, index, metadata, top_k)

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        chosen_TK: torch.Tensor,
    ) -> torch.Tensor:
        out_THD = self.paged_attention(q_THD, *kv_cache.parts, metadata, params)
        return chosen_keys.attend_chosen(q_THD, kv_cache, metadata, params, chosen_TK, out_THD)

    def capture(self, forward: Forward[PassResult], *, lends: bool = False) -> Forward[PassResult]:
        return forward

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        if limits is None:
            return sampling.sample_from_all(logits_RV, seeds_R, positions_R, first_token)
        assert not first_token, "rows of some tokens have no limits of their own"
        return sampling.sample_truncated(logits_RV, seeds_R, positions_R, limits)

    def make_state_planner(self, block_size: int) -> AttentionPlanner:
        return recurrence.StatePlanner(block_size)

    def make_attention_planner(self, spec: AttentionSpec) -> AttentionPlanner:
        if spec.kv_dtype != spec.dtype:
            raise ValueError(
                f"a KV cache of {spec.kv_dtype} under a model of {spec.dtype}: on a CPU only the "
                "native kernels have that, for float32 over bfloat16 or int8; leave "
                "--kv-cache-dtype at auto"
            )
        return TorchAttentionPlanner(self._tiles, spec)

    def allocate_blocks(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Their pages are those that the system hands out as they are written. `torch.zeros` writes
        them all at once, which takes seconds and all of the cache's memory before it is used. They
        begin with a cache line: NumPy's own begin 16 bytes behind a page."""
        num_bytes = num_blocks * block_bytes
        memory = np.zeros(num_bytes + LAYER_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % LAYER_ALIGNMENT
        return torch.from_numpy(memory[start : start + num_bytes]).view(num_blocks, block_bytes)
