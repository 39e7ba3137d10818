"""The last step of a transformers model, hidden states to logits, by the model's own code."""

from typing import Any

import torch
from torch import nn


class TransformersHead:
    """Hidden states to logits by the model's own code (scale, softcap, bias and all): its causal
    language model runs with a stand-in for the backbone that hands over what it is given."""

    def __init__(self, model: Any) -> None:
        prefix = model.base_model_prefix
        whole = getattr(model, prefix)
        # some (OPT) call a decoder inside of the base model, and so do we
        self.backbone = getattr(whole, "decoder", whole)
        self._model = model
        self._stand_in = _StandIn()
        setattr(model, prefix, self._stand_in)

    def __call__(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        self._stand_in.hidden_1RE = hidden_RE[None]
        token_ids = torch.zeros(1, hidden_RE.shape[0], dtype=torch.int64)
        logits_RV: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        return logits_RV.float()


class _StandIn(nn.Module):
    """Returns the hidden states that were left with it, whatever it is called with."""

    hidden_1RE: torch.Tensor

    @property
    def decoder(self) -> "_StandIn":
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden_1RE)
