"""From a prompt and parameters to a request that this model can serve.

Owns every check that is made before anything is sent. Must not know which requests are live, or
the connection.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frontend.beam_search import BeamSearchParams
from frontend.errors import InvalidInput
from frontend.live_request import FIRST_COME, LiveRequest, Turn
from frontend.prompts import PromptReader, TokensPrompt, with_cache_salt
from frontend.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer
from protocol.outputs import ModelInfo

ChatMessage = Mapping[str, Any]

_MAX_PRIORITY = 2**31 - 1


class RequestFactory:
    """
    Args:
        model: what the engine serves.
        tokenizer: the model's, if it came with one.
        seeds: draws the seed of a request that has none.
    """

    def __init__(
        self, model: ModelInfo, tokenizer: Tokenizer | None, *, seeds: random.Random
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._reader = PromptReader(tokenizer, model.max_model_len, model.vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidInput: the model came without one.
        """
        if self._tokenizer is None:
            raise InvalidInput("the engine's model came without a tokenizer; send prompt_token_ids")
        return self._tokenizer

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """None if the model came without one."""
        return self._tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as a new object."""
        return SamplingParams.from_defaults(self.model.default_sampling)

    def make(
        self,
        prompt: object,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        turn: Turn = FIRST_COME,
        cache_salt: str | None = None,
        name: str = "prompt",
        on_finished: Callable[[LiveRequest], None] | None = None,
    ) -> LiveRequest:
        """
        Args:
            cache_salt: for a prompt that has none of its own.
            name: what to call the prompt in an error.

        Raises:
            InvalidInput: this model or this engine cannot serve it.
        """
        beam_search = None
        if isinstance(params, BeamSearchParams):
            beam_search, params = params.to_wire(), params.sampling_params()
        if params is None:
            params = self.default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise InvalidInput(
                f"sampling_params is of type {type(params).__name__}, it must be SamplingParams"
            )
        _check_turn(turn)
        self._check_model_limits(params)
        read = self._reader.read(prompt, truncate_to=params.truncate_prompt_tokens, name=name)
        return LiveRequest(
            request_id,
            with_cache_salt(read, cache_salt, name),
            params,
            tokenizer=self._tokenizer,
            max_model_len=self.model.max_model_len,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            turn=turn,
            beam_search=beam_search,
            on_finished=on_finished,
        )

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """A conversation as text and tokens, by the model's own chat template or another."""
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            **(template_variables or {}),
        )
        # The template writes the special tokens itself.
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _check_model_limits(self, params: SamplingParams) -> None:
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInput(
                "stop strings need text, and the engine's model came without a tokenizer; use "
                "stop_token_ids"
            )
        limit = self.model.max_logprobs
        wanted = params.logprobs
        if wanted is not None and limit >= 0 and not 0 <= wanted <= limit:
            raise InvalidInput(
                f"logprobs is {wanted}, the engine's limit is {limit}; ask for fewer or start it "
                "with a larger --max-logprobs"
            )


def _check_turn(turn: Turn) -> None:
    if not isinstance(turn.priority, int) or isinstance(turn.priority, bool):
        raise InvalidInput(f"priority is {turn.priority!r}, it must be a whole number")
    if not -_MAX_PRIORITY <= turn.priority <= _MAX_PRIORITY:
        raise InvalidInput(
            f"priority is {turn.priority}, it must be from {-_MAX_PRIORITY} to {_MAX_PRIORITY}"
        )
    if turn.tenant is not None and not (isinstance(turn.tenant, str) and turn.tenant):
        raise InvalidInput(f"tenant is {turn.tenant!r}, it must be a non-empty string")
