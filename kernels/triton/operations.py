"""`Operations` on an NVIDIA GPU through Triton, dense products through cuBLAS.

Under Triton's interpreter the same code runs on CPU tensors: so it is proven without a GPU."""

from collections.abc import Set as AbstractSet

import torch

from kernels.interface.kv_cache import KVCache
from kernels.interface.lora import LoRARows, LoRAStack
from kernels.interface.operations import (
    AllReduce,
    AttentionMetadata,
    AttentionParams,
    AttentionPlanner,
    AttentionSpec,
    Forward,
    InputRounding,
    Operations,
    PassResult,
    take_rows,
)
from kernels.interface.recurrence import RecurrenceParams, RecurrentCache
from kernels.interface.special_inputs import replace_rows
from kernels.interface.weights import (
    ExpertRouting,
    ExpertWeights,
    LinearWeight,
    WeightPacking,
    WeightPart,
)
from kernels.torch import elementwise
from kernels.torch.recurrence import StatePlanner
from kernels.triton import activation, norm
from kernels.triton.attention import kv_cache as cache_of_layer
from kernels.triton.attention import rotary_cache
from kernels.triton.attention.paged import paged_attention
from kernels.triton.attention.planner import SplitScratch, TritonAttentionPlanner
from kernels.triton.block_copies import TritonBlockCopier
from kernels.triton.device_limits import multiplies_float8
from kernels.triton.host_experts import HostExperts
from kernels.triton.host_memory import row_table
from kernels.triton.linear import layers as linear_layers
from kernels.triton.linear import lora
from kernels.triton.linear.experts import (
    TritonExpertWeights,
    invariant_tile_rows,
    mixture_of_experts,
    prepare_experts,
)
from kernels.triton.linear.few_rows import FewRowsProducts
from kernels.triton.linear.fp8 import Float8Weight
from kernels.triton.linear.layers import (
    QUANTISED_TYPES,
    Float8Inputs,
    TritonLinearWeight,
    TritonPacking,
    TritonQuantisedWeight,
)
from kernels.triton.linear.quantised_experts import QuantisedExperts
from kernels.triton.recurrence import gates
from kernels.triton.recurrence.convolution import convolve
from kernels.triton.recurrence.recur import recur

_NO_INDEXER = "keys that an indexer chooses have no GPU kernel; run this model with --device cpu"


class TritonOperations:
    """See `kernels.interface.operations.Operations` for every method.

    Holds scratch of attention, so one thread uses an instance at a time, on one stream. Operations
    queue their work and wait for nothing; those of a model's forward pass can be captured in a CUDA
    graph.

    Args:
        device: a CUDA device, or the CPU under Triton's interpreter.
        batch_invariant: a request has the same bits whatever else runs, and however its tokens were
            spread over steps. Dense products then go through one kernel of ours, and every request
            through the kernel that prefills use; both cost speed.
        quantised_types: of the model's weights that are to stay what they are; the others, and
            those of no type that runs here, are computed in the model's dtype.
        few_rows: of this device, multiply steps of up to 16 rows in place of the library. Not with
            `batch_invariant`, whose one product takes every number of rows.
    """

    embedding = staticmethod(linear_layers.gather_rows)
    replace_rows = staticmethod(replace_rows)
    take_rows = staticmethod(take_rows)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activation.gelu_tanh_and_mul)
    gelu_and_mul = staticmethod(elementwise.gelu_and_mul)
    layer_norm = staticmethod(elementwise.layer_norm)
    add_layer_norm = staticmethod(elementwise.add_layer_norm)
    mean_direction = staticmethod(elementwise.mean_direction)
    activate = staticmethod(elementwise.activate)
    rotary_and_cache = staticmethod(rotary_cache.rotary_and_cache)
    write_kv_cache = staticmethod(rotary_cache.write_kv_cache)
    read_kv_cache = staticmethod(cache_of_layer.read_kv_cache)
    view_kv_cache = staticmethod(cache_of_layer.view_kv_cache)
    make_block_copier = staticmethod(TritonBlockCopier)
    paged_attention = staticmethod(paged_attention)
    convolve = staticmethod(convolve)
    gated_norm = staticmethod(gates.gated_norm)
    gate = staticmethod(gates.gate)
    make_state_planner = staticmethod(StatePlanner)
    prepare_linear = staticmethod(TritonLinearWeight)
    prepare_experts = staticmethod(prepare_experts)
    needs_decodes_first = True

    def __init__(
        self,
        device: torch.device,
        *,
        batch_invariant: bool = False,
        quantised_types: AbstractSet[str] = frozenset(),
        few_rows: FewRowsProducts | None = None,
    ) -> None:
        assert few_rows is None or not batch_invariant, "one product for every number of rows"
        self.device = device
        self._few_rows = few_rows
        self._host: HostExperts | None = None
        self._packs = bool(quantised_types & QUANTISED_TYPES)
        self._packing: TritonPacking | None = None
        self._batch_invariant = batch_invariant
        self._scratch = SplitScratch(device)

    @property
    def name(self) -> str:
        return f"triton-{self.device.type}" + "-batch-invariant" * self._batch_invariant

    @property
    def instruction_set(self) -> str:
        if self.device.type != "cuda":
            return "interpreted"
        return "sm_{}{}".format(*torch.cuda.get_device_capability(self.device))

    @property
    def build(self) -> str:
        return f"triton-{torch.__version__}"

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def wake_threads(self) -> None:
        """They are torch's."""

    def weight_packing(self, dtype: torch.dtype, experts: str = "") -> WeightPacking | None:
        if self._host is not None and self._host.has(experts):
            return self._host.packing
        if self._packs and self._packing is None:
            self._packing = TritonPacking(
                self.device, dtype, rounds_to_float8=multiplies_float8(self.device)
            )
        return self._packing

    def leave_experts_to(self, host: Operations, num_layers: int) -> None:
        """Experts of the first layers will be packed and computed by these operations of a CPU.
        Called before a model asks for a packing."""
        self._host = HostExperts(host, num_layers, self.device)

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return linear_layers.linear(
            x_TE, weight, batch_invariant=self._batch_invariant, few_rows=self._few_rows
        )

    def input_rounding(self, weight: LinearWeight) -> InputRounding | None:
        match weight:
            case TritonQuantisedWeight(Float8Weight() as codes, bias_N, dtype):
                return Float8Inputs(codes, bias_N, dtype, self._batch_invariant)
        return None

    def row_table(self, part: WeightPart, dtype: torch.dtype) -> torch.Tensor:
        return row_table(part, dtype, self.device)

    def reduce(self, x_TE: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        return all_reduce(x_TE)

    def lora_rows(
        self, num_slots: int, *, max_rank: int, max_num_tokens: int, dtype: torch.dtype
    ) -> LoRARows:
        return lora.TritonLoRARows(
            num_slots,
            max_rank=max_rank,
            max_num_tokens=max_num_tokens,
            dtype=dtype,
            device=self.device,
        )

    def add_lora(self, out_TN: torch.Tensor, x_TE: torch.Tensor, stack: LoRAStack) -> torch.Tensor:
        assert isinstance(stack, lora.TritonLoRAStack), "made by another backend"
        return lora.add_lora(out_TN, x_TE, stack)

    def mixture_of_experts(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        routing: ExpertRouting,
        slot_mapping_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(experts, TritonExpertWeights | QuantisedExperts):
            assert self._host is not None, "prepared by another backend"
            return self._host.compute(x_TE, router_logits_TX, experts, routing)
        tile_rows = invariant_tile_rows(x_TE.dtype) if self._batch_invariant else None
        return mixture_of_experts(
            x_TE, router_logits_TX, experts, routing, slot_mapping_T, tile_rows=tile_rows
        )

    def recur(
        self,
        qkv_TC: torch.Tensor,
        a_TN: torch.Tensor | None,
        b_TH: torch.Tensor | None,
        params: RecurrenceParams,
        cache: RecurrentCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        only_blocks = self._batch_invariant
        return recur(qkv_TC, a_TN, b_TH, params, cache, metadata, only_blocks=only_blocks)

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        index: KVCache,
        metadata: AttentionMetadata,
        top_k: int,
    ) -> torch.Tensor:
        raise NotImplementedError(_NO_INDEXER)

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        chosen_TK: torch.Tensor,
    ) -> torch.Tensor:
        raise NotImplementedError(_NO_INDEXER)

    def capture(self, forward: Forward[PassResult], *, lends: bool = False) -> Forward[PassResult]:
        return forward

    def make_attention_planner(self, spec: AttentionSpec) -> AttentionPlanner:
        return TritonAttentionPlanner(
            spec, device=self.device, scratch=self._scratch, only_tiles=self._batch_invariant
        )

    def allocate_blocks(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        return torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=self.device)
