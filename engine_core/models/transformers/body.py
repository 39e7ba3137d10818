"""A causal language model of transformers, cut in two: hidden states, and logits from them.

    CausalLM.forward:   input ids -> [ body ] -> last_hidden_state -> head, scale, softcap -> logits
                                                  forward ^             ^ compute_logits

The second half is the model's own code, run with the body replaced by the hidden states at hand:
whatever a model does behind its body (Cohere's scale, Gemma's softcap, a projection) is done, and
nothing here knows about it. Must not know caches, attention or any architecture.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine_core.models.errors import UnsupportedArchitecture


class CausalBody:
    """
    Args:
        model: a ...ForCausalLM.
        body: the outermost of its modules that returns `last_hidden_state`.
        output_type: the class of what it returns.
    """

    def __init__(self, model: Any, body: nn.Module, output_type: type[Any]) -> None:
        self.model = model
        self._body = body
        self._output_type = output_type
        self._accepted = set(inspect.signature(body.forward).parameters)

    def accepts(self, name: str) -> bool:
        """Whether the body names this argument."""
        return name in self._accepted

    def hidden_states(self, token_ids_T: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Run the body on one sequence -> hidden_TE. Arguments that it does not name are left out:
        it works them out from the others."""
        known = {name: value for name, value in arguments.items() if name in self._accepted}
        output = self._body(input_ids=token_ids_T[None], **known)
        hidden_1TE: torch.Tensor = output.last_hidden_state
        return hidden_1TE[0]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Run what follows the body -> float32 logits_RV."""
        token_ids_1R = torch.zeros(1, hidden_RE.shape[0], dtype=torch.int64)
        with self._answering(self._output_type(last_hidden_state=hidden_RE[None])):
            output = self.model(input_ids=token_ids_1R, use_cache=False)
        logits_1RV: torch.Tensor = output.logits
        return logits_1RV[0].float()

    @contextmanager
    def _answering(self, output: Any) -> Iterator[None]:
        """The body answers `output` to every call."""

        def answer(*_args: object, **_kwargs: object) -> Any:
            return output

        self._body.forward = answer
        try:
            yield
        finally:
            # uncovers the method of the class again
            del self._body.forward


def run_and_find_body(model: Any, token_ids_T: torch.Tensor) -> tuple[CausalBody, Any]:
    """Run the whole model once, plainly -> (its two halves, its output).

    Raises:
        UnsupportedArchitecture: no module returns hidden states, or nothing returns logits.
    """
    seen: list[tuple[nn.Module, type[Any]]] = []

    def remember(module: nn.Module, _args: object, output: object) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            seen.append((module, type(output)))

    handles = [
        module.register_forward_hook(remember) for module in model.modules() if module is not model
    ]
    try:
        output = model(input_ids=token_ids_T[None], use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    if not seen or not isinstance(getattr(output, "logits", None), torch.Tensor):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not go from hidden states to logits in a way that can be "
            "split; only language models that do are supported"
        )
    # hooks fire when a module returns, so the outermost comes last
    body, output_type = seen[-1]
    return CausalBody(model, body, output_type), output
