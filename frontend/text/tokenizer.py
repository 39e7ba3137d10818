"""Text to tokens and back, with the tokenizer that the engine sends in WELCOME."""

from __future__ import annotations

import copy
import hashlib
import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from frontend.errors import ChatTemplateError, InvalidInput
from frontend.text.fim_formats import fim_tokens
from frontend.text.long_texts import (
    LONG_CHARS,
    TokenSize,
    give_back_memory,
    token_size,
)
from frontend.text.token_pieces import TokenPieces
from protocol.outputs import TokenizerInfo

if TYPE_CHECKING:
    import tokenizers


_MAX_WORDS, _MAX_WORD_CHARS = 2**14, 32
"""Kept with their tokens: some 4 MB."""


class Tokenizer:
    """
    Attributes:
        special_tokens: names such as "bos_token" and their texts, as templates see them.
        chat_template: Jinja2 source, or None.
        named_chat_templates: further ones, such as "tool_use".
    """

    def __init__(self, backend: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        # a saved tokenizer may carry its training's truncation, which would cut prompts silently
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = info.chat_template
        self.named_chat_templates = info.named_chat_templates
        self.special_tokens = info.special_tokens
        self.known_words: dict[str, list[int]] = {}

    @classmethod
    def from_welcome(cls, info: TokenizerInfo, tokenizer_json: bytes | memoryview) -> Tokenizer:
        """The tokenizer that WELCOME describes; `tokenizer_json` is its binary frame. Clients of
        one process share equal ones: parsing takes time and megabytes.
        Raises ValueError: the document is not one that the installed `tokenizers` can read."""
        special = tuple(sorted(info.special_tokens.items()))
        named = tuple(sorted(info.named_chat_templates.items()))
        key = (hashlib.sha256(tokenizer_json).digest(), info.chat_template, named, special)
        if (known := in_use.get(key)) is not None:
            return known
        import tokenizers

        try:
            made = cls(tokenizers.Tokenizer.from_buffer(bytes(tokenizer_json)), info)
            return in_use.setdefault(key, made)
        except BaseException as error:
            _raise_unless_of_rust(error)
            raise ValueError(
                f"the engine sent a tokenizer that tokenizers {tokenizers.__version__} cannot read "
                f"({error}); install the version of tokenizers that the engine has"
            ) from error

    def with_template(self, chat_template: str) -> Tokenizer:
        """The same, with this chat template alone."""
        other = copy.copy(self)
        other.chat_template, other.named_chat_templates = chat_template, {}
        return other

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own figure may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def token_size(self) -> TokenSize | None:
        """How much of a text one token stands for, at most; None: not known."""
        return token_size(self.backend)

    @cached_property
    def pieces(self) -> TokenPieces:
        """What single tokens add to a text; shared by all streams of this client."""
        return TokenPieces(self.backend, self.special_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A text from a chat template carries its own special tokens: encode
        it with `add_special_tokens=False`.

        Raises:
            TypeError: `text` is not a string.
            InvalidInput: `text` has a lone surrogate, which no encoding can express; or the model's
                tokenizer fails on it.
        """
        token_ids = self._encoding(text, add_special_tokens).ids
        give_back_memory(len(text))
        return token_ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}, it must be a str")
        try:
            if len(text) > LONG_CHARS:  # other threads run meanwhile; and without offsets
                return self.backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )[0]
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise InvalidInput(
                "the text has a lone surrogate (half of a UTF-16 pair), which is no character; "
                "decode the input as UTF-8 with errors='replace'"
            ) from None
        except BaseException as error:
            _raise_unless_of_rust(error)
            raise InvalidInput(
                f"the model's tokenizer fails on this text ({error}); send token ids, or start the "
                "engine with another --tokenizer"
            ) from error

    def encode_as_text(self, text: str) -> list[int]:
        """Token ids of a text alone, in which special tokens, and those of filling in the middle,
        are the text that they are written with. Raises: see `encode`."""
        token_ids = self.encode(text, add_special_tokens=False)
        if self._not_text.isdisjoint(token_ids):
            return token_ids
        return self._plain.encode(text, add_special_tokens=False)

    @cached_property
    def _not_text(self) -> frozenset[int]:
        found = map(self.backend.token_to_id, fim_tokens(self.special_tokens))
        return self.special_token_ids.union(each for each in found if each is not None)

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy that finds no special token in a text: making it takes a second."""
        import tokenizers

        other = copy.copy(self)
        other.backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        other.backend.encode_special_tokens = True
        names = map(self.backend.id_to_token, self._not_text)
        other.backend.add_special_tokens([name for name in names if name is not None])
        return other

    @cached_property
    def ids_before_text(self) -> tuple[int, ...]:
        """The special tokens that stand before any text."""
        whole = self._encoding("a", True)
        marked = zip(whole.ids, whole.special_tokens_mask, strict=True)
        return tuple(token_id for token_id, _ in itertools.takewhile(lambda each: each[1], marked))

    def encode_within(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
        side: str = "right",
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of two as one prompt, at most `limit` with special tokens: of the
        longer text tokens are cut at `side`. And where the second begins, as its type ids say.
        Raises InvalidInput, TypeError: see `encode`."""
        if pair is None and add_special_tokens and (around := self.around_words) is not None:
            token_ids = self._tokens_by_words(text)
            if limit is not None:
                left = max(0, limit - sum(map(len, around)))
                first = 0 if side == "right" else max(0, len(token_ids) - left)
                token_ids = token_ids[first : first + left]
            return [*around[0], *token_ids, *around[1]], None
        whole = None
        if pair is None and (limit is None or len(text) <= 2 * limit):  # it is hardly longer
            whole = self._encoding(text, add_special_tokens)
        if whole is None or (limit is not None and len(whole) > limit):
            whole = self._cut_encoding(text, pair, add_special_tokens, limit, side)
        type_ids = whole.type_ids
        return whole.ids, type_ids.index(1) if 1 in type_ids else None

    @cached_property
    def around_words(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and behind a text whose tokens are those of its words: of a
        tokenizer for BERT, which sees no word's neighbours. None: of another one."""
        from tokenizers import models, normalizers, pre_tokenizers

        backend, added = self.backend, self.backend.get_added_tokens_decoder().values()
        if (
            not isinstance(backend.model, models.WordPiece)
            or not isinstance(backend.normalizer, normalizers.BertNormalizer)
            or not isinstance(backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            or any(" " in token.content for token in added)
        ):
            return None
        whole = self._encoding("a", True)
        start = whole.special_tokens_mask.index(0)
        return None if 1 in whole.type_ids else (whole.ids[:start], whole.ids[start + 1 :])

    def _tokens_by_words(self, text: str) -> list[int]:
        """Most words have been seen before, and looking one up takes less than encoding it."""
        token_ids: list[int] = []
        known = self.known_words
        for word in text.split(" "):
            if (found := known.get(word)) is None:
                found = self.encode(word, add_special_tokens=False)
                if len(word) <= _MAX_WORD_CHARS:
                    if len(known) >= _MAX_WORDS:
                        known.clear()
                    known[word] = found
            token_ids += found
        return token_ids

    def _cut_encoding(
        self, text: str, pair: str | None, add_special_tokens: bool, limit: int | None, side: str
    ) -> tokenizers.Encoding:
        parts = [self._encoding(each, False) for each in (text, pair) if each is not None]
        if limit is not None:
            num_special = self.backend.num_special_tokens_to_add(pair is not None)
            left = max(0, limit - num_special * add_special_tokens)
            lengths = [len(part) for part in parts]
            lengths = _cut_lengths(lengths, left)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=side)
        second = parts[1] if pair is not None else None
        return self.backend.post_process(parts[0], second, add_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token itself, as the vocabulary has it."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer does not know add nothing.
        Raises ValueError: an id is negative or above 2**32 - 1."""
        try:
            if len(ids) > LONG_CHARS:  # other threads run meanwhile
                return self.backend.decode_batch(
                    [list(ids)], skip_special_tokens=skip_special_tokens
                )[0]
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < 2**32)
            raise ValueError(
                f"token id {wrong} is impossible, ids go from 0 to {self.vocab_size - 1}"
            ) from None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = False, **options: Any
    ) -> str | list[int]:
        """The prompt of a conversation, as text (encode it with `add_special_tokens=False`) or,
        with `tokenize`, as token ids.
        `options`: see `chat_text`. Raises ChatTemplateError: see `chat_text`."""
        text = self.chat_text(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with `add_special_tokens=False`.
        Raises ChatTemplateError: no template, messages or options that the template does not take,
        or a template that fails.

        Args:
            chat_template: see `used_template`.
            options: see `chat_template.render_chat`; others are variables of the template.
        """
        template = self.used_template(chat_template, has_tools=bool(options.get("tools")))
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template: it continues texts rather than answer; take an "
                "instruct model, give chat_template (Jinja2), or have it complete a prompt"
            )
        from frontend.text.chat_template import own_renderers, render_chat, request_renderers

        renderers = own_renderers if self.is_own(chat_template) else request_renderers
        special = self.special_tokens
        return render_chat(
            template, messages, special_tokens=special, renderers=renderers, **options
        )

    def used_template(self, chat_template: str | None, *, has_tools: bool = False) -> str | None:
        """The source of the template for a conversation, as transformers chooses it.

        Args:
            chat_template: another one's source, or the name of one of the model's; None: with
                tools "tool_use", if there is one, otherwise the default.

        Raises:
            ChatTemplateError: the model has none of this name.
        """
        named = self.named_chat_templates
        if chat_template is None:
            return named.get("tool_use", self.chat_template) if has_tools else self.chat_template
        if not isinstance(chat_template, str) or not chat_template.isidentifier():
            return chat_template
        if (source := {"default": self.chat_template, **named}.get(chat_template)) is None:
            there = ", ".join(named) or "none but its default"
            raise ChatTemplateError(
                f"chat_template is {chat_template!r:.100}, which is no Jinja2 source, and the "
                f"model's templates by name are: {there}; give one of these, source, or nothing"
            )
        return source

    def is_own(self, chat_template: str | None) -> bool:
        """Whether that came with the model."""
        source = None if chat_template is None else self.used_template(chat_template)
        return source is None or source in (self.chat_template, *self.named_chat_templates.values())


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises InvalidInput: the model came without one."""
    if tokenizer is None:
        raise InvalidInput("the engine's model came without a tokenizer; send prompt_token_ids")
    return tokenizer


def _cut_lengths(lengths: list[int], left: int) -> list[int]:
    """Of one text or two, together at most `left`: the longer one is cut, then both."""
    first, second = (*lengths, 0)[:2]
    half = left // 2
    if first + second <= left:
        return lengths
    if len(lengths) == 1:
        return [left]
    if first <= half:
        return [first, left - first]
    return [left - second, second] if second <= half else [half, left - half]


def _raise_unless_of_rust(error: BaseException) -> None:
    """`tokenizers` raises bare Exception for all that it refuses, and PanicException, which is no
    Exception, where a document misled it."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


in_use: weakref.WeakValueDictionary[object, Tokenizer] = weakref.WeakValueDictionary()
"""Tokenizers in use, by digest of the document, template and special tokens."""
