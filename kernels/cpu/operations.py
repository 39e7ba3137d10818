"""`Operations` on a CPU through the native library. Calls that it does not take, for their dtype or
layout, go to `TorchOperations`; operations on placeholders are captured (`graph_capture`)."""

import ctypes
from collections.abc import Iterable
from itertools import repeat

import torch

from kernels.cpu.attention import (
    NativeAttentionPlan,
    NativeAttentionPlanner,
    Rotary,
    attention_operands,
    fill_rotary,
    key_choice,
)
from kernels.cpu.captured_forward import CapturedForward
from kernels.cpu.elementwise import NativeElementwise
from kernels.cpu.experts import NativeExpertWeights
from kernels.cpu.graph_capture import capture_of
from kernels.cpu.kv_cache import format_of, read_slots, view_kv_cache, write_slots
from kernels.cpu.library import (
    INT64,
    POINTER,
    NativeLibrary,
    check,
)
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.lora import NativeLoRARows, NativeLoRAStack
from kernels.cpu.packing import FloatFormat, NativePacking
from kernels.cpu.recurrence import NativeRecurrence
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.tensor_checks import check_tensor
from kernels.cpu.weights import PackedLinear
from kernels.interface.kv_cache import KVCache, KVShape
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
    RotaryParams,
)
from kernels.interface.special_inputs import GivenRows, PositionScores, replace_rows
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    ExpertRouting,
    ExpertWeights,
    LinearWeight,
    WeightPacking,
    check_experts,
)
from kernels.torch.operations import TorchOperations

_FLOAT32 = torch.float32
# of all products but those in bfloat16
_SET_OF_SAME_BITS = {
    "avx512_bf16": "avx512",
    "amx": "avx512",
    "amx_emulated": "avx512",
    "neon_dot": "neon",
    "neon_i8mm": "neon",
}


class CpuOperations(NativeElementwise, NativeRecurrence, NativeSampling, TorchOperations):
    """See `kernels.interface.operations.Operations` for every method. One thread uses an instance
    at a time. A native operation raises ValueError for a tensor of a wrong shape or layout, and
    for an index out of range; nothing has been written then.

    Args:
        library: from `kernels.cpu.library.load_library`.
        linear_weights: what floating weights become, see `NativePacking`.
        keeps_blocks: see there.
    """

    def __init__(
        self,
        library: NativeLibrary,
        *,
        linear_weights: FloatFormat = "float32",
        keeps_blocks: bool = True,
    ) -> None:
        TorchOperations.__init__(self)
        NativeElementwise.__init__(self, library)
        NativeRecurrence.__init__(self, library)
        NativeSampling.__init__(self, library)
        self._library = library
        self._multiplies_bfloat16 = linear_weights == "bfloat16"
        self._packing = NativePacking(library, linear_weights, keeps_blocks=keeps_blocks)
        self._linear = NativeLinear(library)
        find = library.function
        self._wake_threads = find("ec_pool_wake")
        self._rotary_and_cache = find("ec_rotary_and_cache", POINTER)
        self._embedding = find("ec_embedding", POINTER, INT64, POINTER, *[INT64] * 2, POINTER)
        self._native_attention = find("ec_attention", *[POINTER] * 2, INT64, *[POINTER] * 2)
        self._choose_keys = find("ec_choose_keys", *[POINTER] * 2, INT64, *[POINTER] * 2)
        self._rotary = Rotary()

    @property
    def name(self) -> str:
        isa = self._library.isa
        if not (self._multiplies_bfloat16 and self._library.has_bfloat16):
            isa = _SET_OF_SAME_BITS.get(isa, isa)
        return f"native-cpu-{isa}"

    @property
    def instruction_set(self) -> str:
        return self._library.isa

    @property
    def build(self) -> str:
        return f"{super().build}-{self._library.build}"

    def capture(self, forward: Forward[PassResult], *, lends: bool = False) -> Forward[PassResult]:
        return CapturedForward(self._library, forward, lends=lends)

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    def wake_threads(self) -> None:
        self._wake_threads()

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        if weight_NE.dtype is not _FLOAT32:
            return super().prepare_linear(weight_NE, bias_N)
        return self._packing.pack_alone(weight_NE, bias_N)

    def weight_packing(self, dtype: torch.dtype, experts: str = "") -> WeightPacking | None:
        return self._packing if dtype is _FLOAT32 else None

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.linear(x_TE, weight)
        if not isinstance(weight, PackedLinear | PackedParts):
            return super().linear(x_TE, weight)
        return self._linear(x_TE, weight)

    def prepare_experts(
        self,
        gate_up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        if gate_up_XFE.dtype is not _FLOAT32:
            return super().prepare_experts(gate_up_XFE, down_XEF, activation, biases)
        check_experts(gate_up_XFE.shape, down_XEF.shape, activation, biases)
        of_sides: tuple[Iterable[torch.Tensor | None], ...] = biases or (repeat(None),) * 2
        gate_up, down = (
            list(map(self._packing.pack_alone, stack, of_side))
            for stack, of_side in zip((gate_up_XFE, down_XEF), of_sides, strict=True)
        )
        return NativeExpertWeights(self._library, gate_up, down, activation)

    def mixture_of_experts(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        routing: ExpertRouting,
        slot_mapping_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.mixture_of_experts(x_TE, router_logits_TX, experts, routing)
        if not isinstance(experts, NativeExpertWeights):
            return super().mixture_of_experts(
                x_TE, router_logits_TX, experts, routing, slot_mapping_T
            )
        return experts(x_TE, router_logits_TX, routing)

    def lora_rows(
        self, num_slots: int, *, max_rank: int, max_num_tokens: int, dtype: torch.dtype
    ) -> LoRARows:
        if dtype is not _FLOAT32:
            return super().lora_rows(
                num_slots, max_rank=max_rank, max_num_tokens=max_num_tokens, dtype=dtype
            )
        return NativeLoRARows(self._library, num_slots)

    def add_lora(self, out_TN: torch.Tensor, x_TE: torch.Tensor, stack: LoRAStack) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.add_lora(out_TN, x_TE, stack)
        if not isinstance(stack, NativeLoRAStack):
            return super().add_lora(out_TN, x_TE, stack)
        return stack.add(out_TN, x_TE)

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        if capture := capture_of(token_ids_T):
            return capture.embedding(token_ids_T, weight_VE)
        if isinstance(weight_VE, PackedLinear):
            return self._linear.gather_rows(token_ids_T, weight_VE)
        assert isinstance(weight_VE, torch.Tensor), "packed by another backend"
        if weight_VE.dtype is not _FLOAT32 or not (
            weight_VE.is_contiguous() and token_ids_T.is_contiguous()
        ):
            return super().embedding(token_ids_T, weight_VE)
        num_rows, size = weight_VE.shape
        check_tensor("token_ids", token_ids_T, token_ids_T.shape, torch.int64)
        out = torch.empty((*token_ids_T.shape, size), dtype=_FLOAT32)
        ids, num_ids = token_ids_T.data_ptr(), token_ids_T.numel()
        check(self._embedding(ids, num_ids, weight_VE.data_ptr(), num_rows, size, out.data_ptr()))
        return out

    def reduce(self, x_TE: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.reduce(x_TE, all_reduce)
        return all_reduce(x_TE)

    def replace_rows(self, x_TE: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.replace_rows(x_TE)
        return replace_rows(x_TE, given)

    def take_rows(self, x_TE: torch.Tensor, output: OutputRows | None) -> torch.Tensor:
        if capture := capture_of(x_TE):
            return capture.take_rows(x_TE)
        return super().take_rows(x_TE, output)

    def rotary_and_cache(
        self,
        qkv_TN: torch.Tensor,
        positions_T: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache | None,
        params: RotaryParams,
    ) -> torch.Tensor:
        call = (qkv_TN, positions_T, slot_mapping_T, kv_cache, params)
        if capture := capture_of(qkv_TN):
            return capture.rotary_and_cache(*call)
        if qkv_TN.dtype is not _FLOAT32 or (
            kv_cache is not None and format_of(kv_cache.shape.dtype) is None
        ):
            return super().rotary_and_cache(*call)
        qkv_TN = qkv_TN.contiguous()
        num_tokens, width = qkv_TN.shape
        rotary, head_size = self._rotary, params.head_size
        if (wanted := fill_rotary(rotary, kv_cache, params)) != width:
            raise ValueError(
                f"qkv is {tuple(qkv_TN.shape)}; {params.num_query_heads} heads of q and those of k "
                f"and v, {rotary.num_kv_heads} in the cache, of {head_size} are {wanted} columns"
            )
        check_tensor("cos_sin", params.cos_sin_PD, params.cos_sin_PD.shape)
        check_tensor("positions", positions_T, (num_tokens,), torch.int64)
        check_tensor("slot_mapping", slot_mapping_T, (num_tokens,), torch.int64)
        rotary.qkv = qkv_TN.data_ptr()
        rotary.positions = positions_T.data_ptr()
        rotary.slots = slot_mapping_T.data_ptr()
        rotary.num_tokens = num_tokens
        rotary.qkv_stride = width
        check(self._rotary_and_cache(ctypes.addressof(rotary)))
        shape = (num_tokens, params.num_query_heads, head_size)
        return qkv_TN.as_strided(shape, (width, head_size, 1))

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        positions: PositionScores | None = None,
    ) -> torch.Tensor:
        plan = metadata.plan
        if not isinstance(plan, NativeAttentionPlan):
            return super().paged_attention(q_THD, k_cache, v_cache, metadata, params, positions)
        assert params.sliding_window == metadata.sliding_window, "planned for another window"
        return self._attend(q_THD, k_cache, v_cache, plan, params, positions)

    def _attend(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: NativeAttentionPlan,
        params: AttentionParams,
        positions: PositionScores | None = None,
        chosen_TK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if capture := capture_of(q_THD):
            return capture.paged_attention(
                q_THD, k_cache, v_cache, plan, params, positions, chosen_TK
            )
        geometry = plan.geometry
        num_heads, head_size = geometry.num_query_heads, geometry.head_size
        shape = (geometry.num_tokens, num_heads, head_size)
        if q_THD.shape != shape:
            raise ValueError(
                f"q is {tuple(q_THD.shape)}, the plan is for [T, H, D] = {list(shape)}"
            )
        operands = attention_operands(plan, k_cache, v_cache, params, positions)
        if chosen_TK is not None:
            operands.top_k = chosen_TK.shape[1]
            check_tensor("chosen", chosen_TK, (shape[0], operands.top_k), torch.int32)
            operands.chosen = chosen_TK.data_ptr()
        if q_THD.stride(2) != 1 or q_THD.stride(1) != head_size or q_THD.stride(0) < 0:
            q_THD = q_THD.contiguous()
        out_THD = torch.empty((*shape[:2], geometry.value_size), dtype=_FLOAT32)
        check(
            self._native_attention(
                plan.address,
                q_THD.data_ptr(),
                q_THD.stride(0),
                ctypes.addressof(operands),
                out_THD.data_ptr(),
            )
        )
        return out_THD

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        index: KVCache,
        metadata: AttentionMetadata,
        top_k: int,
    ) -> torch.Tensor:
        plan = metadata.plan
        if not isinstance(plan, NativeAttentionPlan):
            return super().choose_keys(q_THD, weights_TH, index, metadata, top_k)
        if capture := capture_of(q_THD):
            return capture.choose_keys(q_THD, weights_TH, index, plan, top_k)
        num_tokens, num_heads, size = q_THD.shape
        call = key_choice(index, num_heads, plan, top_k)
        weights_TH = weights_TH.contiguous()
        check_tensor("weights", weights_TH, (plan.geometry.num_tokens, num_heads))
        call.weights, call.weights_stride = weights_TH.data_ptr(), num_heads
        if q_THD.stride(2) != 1 or q_THD.stride(1) != size or size != call.head_size:
            raise ValueError(f"q is {tuple(q_THD.shape)}, keys have {call.head_size} elements")
        chosen_TK = torch.empty((num_tokens, top_k), dtype=torch.int32)
        addresses = ctypes.addressof(call), chosen_TK.data_ptr()
        check(self._choose_keys(plan.address, q_THD.data_ptr(), q_THD.stride(0), *addresses))
        return chosen_TK

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        chosen_TK: torch.Tensor,
    ) -> torch.Tensor:
        plan = metadata.plan
        if not isinstance(plan, NativeAttentionPlan):
            return super().attend_chosen(q_THD, kv_cache, metadata, params, chosen_TK)
        return self._attend(q_THD, *kv_cache.parts, plan, params, chosen_TK=chosen_TK)

    def make_attention_planner(self, spec: AttentionSpec) -> AttentionPlanner:
        if spec.dtype is not _FLOAT32 or format_of(spec.kv_dtype) is None:
            return super().make_attention_planner(spec)
        return NativeAttentionPlanner(spec, rounds=self._multiplies_bfloat16)

    def view_kv_cache(self, blocks_BN: torch.Tensor, shape: KVShape) -> KVCache:
        view = super().view_kv_cache if format_of(shape.dtype) is None else view_kv_cache
        return view(blocks_BN, shape)

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache,
    ) -> None:
        if format_of(kv_cache.shape.dtype) is None:
            super().write_kv_cache(k_TKD, v_TKD, slot_mapping_T, kv_cache)
            return
        write_slots(kv_cache.keys, slot_mapping_T, k_TKD, are_keys=True)
        if not kv_cache.shape.values_in_keys:
            write_slots(kv_cache.values, slot_mapping_T, v_TKD, are_keys=False)

    def read_kv_cache(
        self, kv_cache: KVCache, slots_L: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if format_of(kv_cache.shape.dtype) is None:
            return super().read_kv_cache(kv_cache, slots_L)
        return (
            read_slots(kv_cache.keys, slots_L, are_keys=True),
            read_slots(kv_cache.values, slots_L, are_keys=False),
        )
