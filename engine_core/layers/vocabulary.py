"""Token embedding and language-model head, tied or not.

Owns both ends of the vocabulary. Must not know sampling: logits leave as float32.
"""

from __future__ import annotations

import torch

from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements
from kernels.interface import LinearWeight, Operations


class Vocabulary:
    """`embed` at the bottom of a model, `logits` at its top.

    A tied head is a repacked copy of the embedding where the backend repacks: memory for one more
    [V, E], two to five times faster products.

    Args:
        tied: the head is the embedding, unless the checkpoint holds another head.
        embedding_scale: factor on embeddings, rounded to the model's dtype.
        softcap: logits become `softcap * tanh(logits / softcap)`.
    """

    def __init__(
        self,
        *,
        embedding_name: str,
        head_name: str,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        embedding_scale: float | None,
        softcap: float | None,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._embedding = Parameter(
            embedding_name, (vocab_size, hidden_size), dtype, device=ops.device
        )
        self._head_name = head_name
        self._tied = tied
        self._dtype = dtype
        self._ops = ops
        self._softcap = softcap
        self._embedding_scale = (
            None
            if embedding_scale is None
            else torch.tensor(embedding_scale, dtype=dtype, device=ops.device)
        )
        self._loaded_head_VE: torch.Tensor | None = None
        self._head: LinearWeight | None = None

    def placements(self) -> Placements:
        """Of embedding and head."""
        head = Placement(tuple(self._embedding.tensor.shape), self._store_head)
        return {**self._embedding.placements(), self._head_name: head}

    @property
    def optional_names(self) -> frozenset[str]:
        """What the checkpoint may leave out."""
        return frozenset({self._head_name} if self._tied else ())

    def finish_loading(self) -> None:
        """Settle the head once every tensor has come.

        As in transformers, a head in the checkpoint of a tied model counts where it differs.
        """
        weight_VE, self._loaded_head_VE = self._loaded_head_VE, None
        if weight_VE is None or (self._tied and torch.equal(weight_VE, self._embedding.tensor)):
            weight_VE = self._embedding.tensor
        self._head = self._ops.prepare_linear(weight_VE)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Ids in [0, V) -> [T, E]."""
        hidden_TE = self._ops.embedding(token_ids_T, self._embedding.tensor)
        return hidden_TE if self._embedding_scale is None else hidden_TE.mul_(self._embedding_scale)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> float32 [R, V], softcap included."""
        assert self._head is not None, "finish_loading was not called"
        logits_RV = self._ops.linear(hidden_RE, self._head)
        if self._softcap is not None:
            logits_RV = (logits_RV / self._softcap).tanh_().mul_(self._softcap)
        return logits_RV.float()

    def _store_head(self, tensor: torch.Tensor, copy: CopyWeight) -> None:
        self._loaded_head_VE = torch.empty_like(self._embedding.tensor)
        copy(self._loaded_head_VE, tensor)
