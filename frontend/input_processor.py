"""From a prompt and parameters to a request that this model can serve; all is checked before it
is sent."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from frontend.errors import InvalidInput
from frontend.inputs.encoder_prompts import EncoderPrompts, SplitPrompt
from frontend.inputs.fim import filled_in, fim_prompt
from frontend.inputs.prompt_embeds import EmbeddedPrompt, embedded_prompt
from frontend.inputs.prompts import (
    ChatMessage,
    PooledPrompt,
    TokensPrompt,
    chars_of,
    chat_chars,
    has_data,
    one_salt,
    parse_prompt,
)
from frontend.multimodal.media import MediaItem, MediaSources, has_media, items_of, split_media
from frontend.pooling_params import PoolingParams
from frontend.reasoning_formats import ReasoningFormat
from frontend.request_options import RequestOptions, wire_options
from frontend.request_state import RequestState
from frontend.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    as_invalid_input,
)
from frontend.text.long_texts import LONG_CHARS, check_chars, check_length
from frontend.text.tokenizer import Tokenizer, needed
from frontend.wire_params import wire_params_of
from protocol.outputs import ModelInfo
from protocol.pooling import POOLING_SAMPLING, PoolingTask
from protocol.requests import EngineRequest, ModelLimits

if TYPE_CHECKING:
    from frontend.multimodal.audio_families import AudioFamily
    from frontend.multimodal.inputs import MultiModalProcessor, MultiModalPrompt


_EMBEDS_KEYS = frozenset({"prompt_embeds", "prompt_is_token_ids"})
_POOLED = SamplingParams(detokenize=False)
_NO_OPTIONS = wire_options()


class _ReadPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    media: "MultiModalPrompt | SplitPrompt | None"
    embeds: EmbeddedPrompt | None


class InputProcessor:
    """
    Args:
        model: what the engine serves.
        tokenizer: the model's, if it came with one.
        seeds: draws the seed of a request that has none.
        now: monotonic seconds.
        reasoning: what may stand before an answer that follows a grammar.
        media_sources: of files that prompts only name.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        seeds: random.Random,
        now: Callable[[], float],
        reasoning: ReasoningFormat | None = None,
        media_sources: Callable[[], MediaSources] = MediaSources,
    ) -> None:
        self.model = model
        self.optional_tokenizer = tokenizer
        self._seeds = seeds
        self._reasoning = reasoning
        self._now = now
        self._media_sources = media_sources
        self._multimodal: MultiModalProcessor | None = None
        self.encoder_prompts: EncoderPrompts | None = None
        """None: the model is a decoder alone."""
        if model.encoder is not None:
            self.encoder_prompts = EncoderPrompts(model, model.encoder, tokenizer, media_sources)
        self._limits = _limits_of(model)

    def of_model(self, model: ModelInfo, tokenizer: Tokenizer | None) -> Self:
        """For the same model at another length, or with another chat template."""
        other = copy.copy(self)
        other.model, other.optional_tokenizer = model, tokenizer
        other._limits, other._multimodal = _limits_of(model), None
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidInput if the model came without one."""
        return needed(self.optional_tokenizer)

    def encode(
        self,
        text: str,
        name: str = "prompt",
        *,
        add_special_tokens: bool = True,
        is_cut: bool = False,
    ) -> list[int]:
        """The tokens of a prompt. Raises InvalidInput: see `Tokenizer.encode`; and of a text that
        is too long by its characters alone, without reading it.
        `is_cut`: it may be more tokens than a prompt."""
        self._check_length(text, name, is_cut=is_cut)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not is_cut and token_ids:  # before others of the same request are read
            with as_invalid_input():
                self._limits.check_prompt(token_ids, name)
        return token_ids

    def tokenized(self, prompt: object, name: str = "prompt", **options: Any) -> object:
        """A prompt that is a text as one that has its tokens, too; any other as it is. Options: see
        `encode`."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping) or chars_of(prompt) == 0:
            return prompt
        if prompt.get("suffix") is not None:
            return fim_prompt(prompt, self.tokenizer, self.model, name)
        return {**prompt, "prompt_token_ids": self.encode(prompt["prompt"], name, **options)}

    def _check_length(self, text: str, name: str, *, is_cut: bool) -> None:
        max_model_len = self.model.max_model_len
        if len(text) > max(LONG_CHARS, max_model_len):
            check_length(text, name, max_model_len, self.tokenizer.token_size, is_cut=is_cut)

    def make_request(
        self,
        prompt: object,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        output_kind: RequestOutputKind | None = None,
        name: str = "prompt",
        on_finished: Callable[[], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestState:
        """
        Args:
            output_kind: default: that of `params`.
            name: what to call the prompt in an error.
            options: the adapter is one that the engine knows; the salt for a prompt that has none.

        Raises:
            InvalidInput: this model or this engine cannot serve it.
        """
        beam_search = None
        if isinstance(params, BeamSearchParams):
            beam_search, params = params.to_wire(), params.sampling_params()
        if params is None:
            params = SamplingParams.from_defaults(self.model.default_sampling)
        if not isinstance(params, SamplingParams):
            raise InvalidInput(
                f"sampling_params is of type {type(params).__name__}, it must be SamplingParams"
            )
        if "generate" not in self.model.tasks:
            raise InvalidInput(
                f"the task is generate, this engine's tasks are {', '.join(self.model.tasks)}; ask "
                "for one of these, or start it with --runner generate"
            )
        fields = wire_options(**options)
        tokenizer = self.optional_tokenizer
        prompt, params = filled_in(prompt, params, tokenizer, self.model, name)
        given = self._read(prompt, params.truncate_prompt_tokens, name)
        num_sequences = params.num_sequences if beam_search is None else beam_search.beam_width
        with as_invalid_input():
            count_name = "n" if num_sequences == params.n else "best_of"
            count_name = count_name if beam_search is None else "beam_width"
            self._limits.check_sequences(num_sequences, beam_search, count_name)
            self._limits.check_prompt(given.token_ids, name)
            seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
            wire_params = wire_params_of(
                params, given.token_ids, self.model, self.optional_tokenizer, self._reasoning, seed
            )
            self._limits.check_sampling(wire_params, len(given.token_ids))
        if given.embeds is not None:
            given.embeds.check(self.model.prompt_embeds, wire_params)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=given.token_ids,
            sampling_params=wire_params,
            num_sequences=num_sequences,
            beam_search=beam_search,
            multimodal_inputs=() if given.media is None else given.media.inputs,
            prompt_embeds=() if given.embeds is None else given.embeds.spans,
            **fields | {"cache_salt": one_salt(given.cache_salt, fields["cache_salt"], name)},
        )
        return RequestState(
            request,
            params,
            prompt_text=given.text,
            output_kind=output_kind or params.output_kind,
            tokenizer=self.optional_tokenizer,
            now=self._now,
            on_finished=on_finished,
            frames=parts.frames if (parts := given.media or given.embeds) is not None else (),
        )

    def _read(self, prompt: object, kept: int | None, name: str) -> "_ReadPrompt":
        """A prompt of any kind, in tokens. `kept`: `truncate_prompt_tokens`."""
        prompt = self.with_media(prompt)
        media: MultiModalPrompt | SplitPrompt | None = None
        embeds: EmbeddedPrompt | None = None
        if isinstance(prompt, Mapping) and "multimodal" in prompt:
            prompt = dict(prompt)
            media = prompt.pop("multimodal")
            _refuse_cut(kept, f"{name} has images or sounds, which cannot be cut; omit it")
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            embeds = embedded_prompt(prompt, self.model, name)
            given = {key: value for key, value in prompt.items() if key not in _EMBEDS_KEYS}
            prompt = given | {"prompt_token_ids": embeds.token_ids}
            _refuse_cut(kept, f"{name} has prompt_embeds; cut them, and omit it")
        text, token_ids, own_salt = parse_prompt(prompt, name)
        if token_ids is None:
            assert text is not None
            token_ids = self.encode(text, name, is_cut=kept is not None)
        if kept is not None:
            token_ids = token_ids[-(self.model.max_model_len - 1 if kept == -1 else kept) :]
        return _ReadPrompt(text, token_ids, own_salt, media, embeds)

    def make_pooling_request(
        self,
        prompt: PooledPrompt,
        params: PoolingParams,
        task: PoolingTask,
        request_id: str,
        *,
        name: str = "prompt",
        on_finished: Callable[[], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestState:
        """Arguments: see `make_request`.
        Raises InvalidInput: this model or this engine cannot serve it."""
        fields = wire_options(**options) if options else _NO_OPTIONS
        text, token_ids, own_salt, second = prompt
        with as_invalid_input():
            self._limits.check_prompt(token_ids, name, num_generated=0)
            second = second if self.model.has_segments else None
            pooling_params = params.to_wire(task, second)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=POOLING_SAMPLING,
            pooling_params=pooling_params,
            **fields | {"cache_salt": one_salt(own_salt, fields["cache_salt"], name)},
        )
        return RequestState(
            request,
            _POOLED,
            prompt_text=text,
            output_kind=RequestOutputKind.FINAL_ONLY,
            tokenizer=None,
            now=self._now,
            on_finished=on_finished,
        )

    def check_task(self, task: PoolingTask) -> None:
        """Raises InvalidInput: the model has none of this name."""
        if task not in self.model.tasks:
            raise InvalidInput(
                f"the task is {task.value}, this engine's tasks are {', '.join(self.model.tasks)}; "
                "ask for one of these, or start an engine with --convert embed or classify, or "
                "with a model made for that"
            )

    def pooled_prompt(
        self, prompt: object, params: PoolingParams, name: str, *, add_special_tokens: bool = True
    ) -> PooledPrompt:
        """One prompt, or two texts to be scored together, in tokens.
        Raises InvalidInput: it is none, or too long to be read."""
        limit, side = params.truncate_prompt_tokens, params.truncation_side
        limit = self.model.max_model_len if limit == -1 else limit
        text, token_ids, own_salt, second = None, None, None, None
        if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[0], str):
            text, pair = prompt
            if not self.model.has_segments:
                text, pair = f"{text}{pair}", None
        else:
            text, token_ids, own_salt = parse_prompt(prompt, name)
            pair = None
        if token_ids is None:
            assert text is not None
            for each in filter(None, (text, pair)):
                self._check_length(each, name, is_cut=limit is not None)
            token_ids, second = self.tokenizer.encode_within(
                text, pair, add_special_tokens=add_special_tokens, limit=limit, side=side
            )
        elif limit is not None:
            token_ids = token_ids[:limit] if side == "right" else token_ids[-limit:]
        return PooledPrompt(text, token_ids, own_salt, second)

    def chat_prompt(
        self, messages: Sequence[ChatMessage], *, is_cut: bool = False, **template_options: Any
    ) -> TokensPrompt:
        """A conversation as text and tokens, its images and sounds decoded. Options: see
        `Tokenizer.chat_text`, and `encode` for `is_cut`."""
        text, items = self.chat_text(messages, is_cut=is_cut, **template_options)
        return self.chat_tokens(text, items, is_cut=is_cut)

    def chat_text(
        self, messages: Sequence[ChatMessage], *, is_cut: bool = False, **template_options: Any
    ) -> tuple[str, list[MediaItem]]:
        """A conversation as text, and its images and sounds as they are."""
        variables = (each for each in template_options.values() if isinstance(each, str))
        num_chars = chat_chars(messages) + sum(map(len, variables))
        check_chars(num_chars, "the conversation", self.model.max_model_len, is_cut=is_cut)
        items: list[MediaItem] = []
        if has_media(messages):
            messages, items = split_media(messages, self._multimodal_processor().part)
        return self.tokenizer.chat_text(messages, **template_options), items

    def chat_tokens(
        self, text: str, items: Sequence[MediaItem], *, is_cut: bool = False
    ) -> TokensPrompt:
        """The prompt of what `chat_text` gave. Decodes `items`."""
        if items:
            self._check_length(text, "prompt", is_cut=True)
            media = self._multimodal_processor().process(text, items, add_special_tokens=False)
            return {"prompt": text, "prompt_token_ids": media.token_ids, "multimodal": media}
        # The template writes the special tokens itself.
        token_ids = self.encode(text, add_special_tokens=False, is_cut=is_cut)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def with_media(self, prompt: object) -> object:
        """A prompt whose `multi_modal_data` is decoded; any other as it is.
        Raises InvalidInput: what cannot be served."""
        if self.encoder_prompts is not None:
            if isinstance(prompt, Mapping) and "multimodal" in prompt:
                return prompt
            split = self.encoder_prompts.split(prompt)
            return {**split.decoder_prompt, "multimodal": split}
        if not isinstance(prompt, Mapping) or "multi_modal_data" not in prompt:
            return prompt
        given = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
        if not has_data(prompt):
            return given
        items = items_of(prompt["multi_modal_data"])
        text, token_ids, _ = parse_prompt(given, "prompt")
        self._check_length(text or "", "prompt", is_cut=True)
        media = self._multimodal_processor().process(
            (text or "") if token_ids is None else token_ids, items, add_special_tokens=True
        )
        return {**given, "prompt_token_ids": media.token_ids, "multimodal": media}

    def transcriber(self) -> "AudioFamily | None":
        """How the model is asked for transcripts; None: it is not asked by a prompt. Raises
        InvalidInput: a package is missing."""
        if self.model.multimodal is None:
            return None
        return self._multimodal_processor().transcriber()

    def _multimodal_processor(self) -> "MultiModalProcessor":
        """Raises InvalidInput: the model takes text only, or a package is missing."""
        if self.model.multimodal is None:
            raise InvalidInput(
                f"the prompt has images or sounds, and model {self.model.name!r} takes text only; "
                "leave them out, or serve a model that takes them"
            )
        if self._multimodal is None:
            try:
                from frontend.multimodal.inputs import MultiModalProcessor
            except ImportError as error:
                raise InvalidInput(
                    f"images and sounds need the package {error.name}, which is not installed; "
                    "pip install engine-core[multimodal]"
                ) from None
            self._multimodal = MultiModalProcessor(
                self.model.name,
                self.model.multimodal,
                self.tokenizer,
                max_model_len=self.model.max_model_len,
                sources=self._media_sources,
            )
        return self._multimodal


def _limits_of(model: ModelInfo) -> ModelLimits:
    return ModelLimits(
        model.max_model_len, model.vocab_size, model.max_logprobs, model.max_num_seqs
    )


def _refuse_cut(kept: int | None, why: str) -> None:
    if kept is not None:
        raise InvalidInput(f"truncate_prompt_tokens is {kept}, and {why}")
