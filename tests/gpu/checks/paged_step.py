"""A random step of paged attention. What no query may see holds NaN, so that reading it shows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from kernels.interface.operations import AttentionMetadata, AttentionParams
from kernels.triton.attention.lists import SHORTEST_SPLIT
from kernels.triton.attention.paged import paged_attention
from kernels.triton.attention.work import AttentionVariant, AttentionWorkspace, WorkLimits
from tests.gpu.checks.errors import poison
from tests.kernels.paged_steps import reference_paged_attention

Request = tuple[int, int]
"""(sequence length, query tokens)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of one layer."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    sliding_window: int | None = None


class PagedStep:
    """Tensors and plan of a step with decodes first.

    Args:
        num_programs: of the decode kernel, see `AttentionWorkspace`.
        max_seq_len: that the workspace is made for; default: the longest of these.
        variant: of the kernels.
    """

    def __init__(
        self,
        heads: Heads,
        decodes: Sequence[Request],
        prefills: Sequence[Request],
        *,
        device: str,
        num_programs: int,
        max_seq_len: int | None = None,
        shortest_split: int = SHORTEST_SPLIT,
        variant: AttentionVariant = AttentionVariant(),  # noqa: B008
    ) -> None:
        requests = [*decodes, *prefills]
        size = heads.block_size
        widths = [-(-length // size) for length, _ in requests]
        num_tokens = sum(queries for _, queries in requests)
        order = torch.randperm(sum(widths)) + 1
        # block 0 is in no sequence; the rows of the table end in it
        table_RM = torch.zeros(len(requests), max(widths) + 1, dtype=torch.int32)
        shape = (1 + sum(widths), 2, heads.num_kv_heads, size, heads.head_size)
        kv_B2KSD = torch.randn(shape, device=device, dtype=heads.dtype)
        kv_B2KSD[0] = float("nan")
        stops = list(accumulate(widths))
        for row, (length, _) in enumerate(requests):
            blocks = order[stops[row] - widths[row] : stops[row]]
            table_RM[row, : len(blocks)] = blocks
            kv_B2KSD[int(blocks[-1]), :, :, length - (len(blocks) - 1) * size :] = float("nan")
        self.heads = heads
        self.requests = requests
        self.q_THD = torch.randn(
            num_tokens, heads.num_query_heads, heads.head_size, device=device, dtype=heads.dtype
        )
        self.kv_B2KSD = kv_B2KSD.to(heads.kv_dtype or heads.dtype)
        starts = [0, *accumulate(queries for _, queries in requests)]
        starts_R1 = torch.tensor(starts, dtype=torch.int32, device=device)
        seq_lens_R = torch.tensor([n for n, _ in requests], dtype=torch.int32, device=device)
        num_prefill_tokens = sum(queries for _, queries in prefills)
        self._workspace = AttentionWorkspace(
            WorkLimits(
                max_requests=len(requests),
                max_prefill_tokens=num_prefill_tokens,
                max_seq_len=max_seq_len or max(length for length, _ in requests),
                num_query_heads=heads.num_query_heads,
                num_kv_heads=heads.num_kv_heads,
                head_size=heads.head_size,
                max_decode_queries=max((queries for _, queries in decodes), default=0),
                sliding_window=heads.sliding_window,
                shortest_split=shortest_split,
            ),
            device=torch.device(device),
            num_programs=num_programs,
            variant=variant,
        )
        poison(self._workspace.work.partial_out)
        poison(self._workspace.work.partial_lse)
        self.metadata = AttentionMetadata(
            query_start_loc_R1=starts_R1,
            seq_lens_R=seq_lens_R,
            block_table_RM=table_RM.to(device),
            slot_mapping_T=torch.empty(0, dtype=torch.int64, device=device),
            block_size=size,
            sliding_window=heads.sliding_window,
            plan=self._workspace.plan(
                query_start_loc_R1=starts_R1,
                seq_lens_R=seq_lens_R,
                has_decodes=bool(decodes),
                num_prefills=len(prefills),
                num_prefill_tokens=num_prefill_tokens,
            ),
        )

    def attend(self, out: torch.Tensor, **options: Any) -> torch.Tensor:
        """The kernels."""
        caches = self.kv_B2KSD.unbind(1)
        params = self._params(options)
        return paged_attention(self.q_THD, *caches, self.metadata, params, out=out)

    def reference(self, **options: Any) -> torch.Tensor:
        """The specification on the CPU, in float32."""
        on_cpu = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
        metadata = replace(
            self.metadata,
            query_start_loc_R1=self.metadata.query_start_loc_R1.cpu(),
            seq_lens_R=self.metadata.seq_lens_R.cpu(),
            block_table_RM=self.metadata.block_table_RM.cpu(),
        )
        caches = self.kv_B2KSD.cpu().transpose(2, 3).unbind(1)
        q_THD = self.q_THD.cpu().float()
        return reference_paged_attention(q_THD, *caches, metadata, self._params(on_cpu))

    def _params(self, options: dict[str, Any]) -> AttentionParams:
        scale, window = self.heads.head_size**-0.5, self.heads.sliding_window
        return AttentionParams(scale=scale, sliding_window=window, **options)

    def num_bytes(self) -> float:
        """Keys and values that are seen, queries and results: each once."""
        window = self.heads.sliding_window
        keys = sum(
            length if window is None else min(length, window + queries - 1)
            for length, queries in self.requests
        )
        a_key = 2 * self.heads.num_kv_heads * self.heads.head_size * self.kv_B2KSD.element_size()
        return float(keys * a_key + 2 * self.q_THD.numel() * self.q_THD.element_size())

    def num_flops(self) -> float:
        """Of both products over the pairs of query and key that are seen; full attention only."""
        pairs = sum(
            queries * (length - queries) + queries * (queries + 1) / 2
            for length, queries in self.requests
        )
        return 4.0 * pairs * self.heads.num_query_heads * self.heads.head_size
