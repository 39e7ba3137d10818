"""Keys that an indexer chooses, and attention to them (DeepSeek sparse attention)."""

from collections.abc import Iterator

import torch

from kernels.interface.kv_cache import KVCache
from kernels.interface.operations import AttentionMetadata, AttentionParams


def choose_keys(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    index: KVCache,
    metadata: AttentionMetadata,
    top_k: int,
) -> torch.Tensor:
    """See `Operations.choose_keys`."""
    chosen_TK = torch.zeros(len(q_THD), top_k, dtype=torch.int32)
    for token, keys_SD in _behind(index, metadata, top_k):
        scores_HS = torch.relu(q_THD[token].float() @ keys_SD.float().T)
        scores_S = weights_TH[token].float() @ scores_HS
        # stable: of equal ones the earlier
        best_K = scores_S.sort(descending=True, stable=True).indices[:top_k]
        chosen_TK[token] = best_K.sort().values.int()
    return chosen_TK


def attend_chosen(
    q_THD: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    params: AttentionParams,
    chosen_TK: torch.Tensor,
    out_THD: torch.Tensor,
) -> torch.Tensor:
    """See `Operations.attend_chosen`. `out_THD`: of attention to all keys; becomes the result."""
    value_size = kv_cache.shape.value_size
    for token, keys_SD in _behind(kv_cache, metadata, chosen_TK.shape[1]):
        keys_KD = keys_SD[chosen_TK[token].long()].float()
        weights_HK = torch.softmax(params.scale * q_THD[token].float() @ keys_KD.T, 1)
        out_THD[token] = (weights_HK @ keys_KD[:, -value_size:]).to(out_THD.dtype)
    return out_THD


def _behind(
    cache: KVCache, metadata: AttentionMetadata, top_k: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Tokens that see more than `top_k` keys, and these keys [S, D]."""
    starts, size = metadata.query_start_loc_R1.tolist(), metadata.block_size
    for request, length in enumerate(metadata.seq_lens_R.tolist()):
        start, stop = starts[request : request + 2]
        if length <= top_k or start == stop:
            continue
        positions_S = torch.arange(length)
        blocks_S = metadata.block_table_RM[request].long()[positions_S // size]
        keys_SD = cache.keys[blocks_S, positions_S % size, 0]
        for token in range(max(start, stop - (length - top_k)), stop):
            yield token, keys_SD[: length - (stop - 1 - token)]
