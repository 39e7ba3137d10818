"""Text to tokens and back, from the tokenizer that the engine sends in WELCOME.

Owns the one `tokenizers.Tokenizer` of a client. Must not know requests, sockets or streams: text
that arrives token by token is `detokenizer`, templates are `chat_template`, and what one token
adds to a text is `token_pieces`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from protocol.outputs import TokenizerInfo

if TYPE_CHECKING:
    import tokenizers

    from frontend.token_pieces import TokenPieces


class Tokenizer:
    """A tokenizer as a client sees it.

    Attributes:
        special_tokens: names such as "bos_token" and their texts, as templates see them.
        chat_template: Jinja2 source, or None.
        fingerprint: same tokenizer, same fingerprint.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        fingerprint: str = "",
    ) -> None:
        # a saved tokenizer may carry its training's truncation; here it would eat prompts silently
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.fingerprint = fingerprint

    @classmethod
    def from_welcome(cls, info: TokenizerInfo, tokenizer_json: bytes | memoryview) -> Tokenizer:
        """The tokenizer that WELCOME describes; `tokenizer_json` is its binary frame.

        Raises:
            ValueError: the document is not one that the installed `tokenizers` can read.
        """
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_buffer(bytes(tokenizer_json))
        # the Rust side raises bare Exception for a bad document
        except Exception as error:
            raise ValueError(
                f"the engine sent a tokenizer that tokenizers {tokenizers.__version__} cannot read "
                f"({error}); install the version of tokenizers that the engine has"
            ) from error
        return cls(
            backend,
            chat_template=info.chat_template,
            special_tokens=info.special_tokens,
            fingerprint=info.fingerprint,
        )

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own figure may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @cached_property
    def pieces(self) -> TokenPieces:
        """What single tokens add to a text; shared by all streams of this client."""
        from frontend.token_pieces import TokenPieces

        return TokenPieces(self.backend, self.special_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A text from a chat template carries its own special tokens: encode
        it with `add_special_tokens=False`.

        Raises:
            TypeError: `text` is not a string.
            ValueError: `text` has a lone surrogate, which no encoding can express.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}, it must be a str")
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise ValueError(
                "the text has a lone surrogate (half of a UTF-16 pair), which is no character; "
                "decode the input as UTF-8 with errors='replace'"
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer does not know add nothing.

        Raises:
            ValueError: an id is negative or above 2**32 - 1.
        """
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < 2**32)
            raise ValueError(
                f"token id {wrong} is impossible, ids go from 0 to {self.vocab_size - 1}"
            ) from None

    def token_text(self, token_id: int) -> str:
        """What one token reads like in the middle of a text, its leading space kept. A token that
        is part of a character only gives U+FFFD; an unknown id gives the empty text."""
        return self.pieces.text(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with `add_special_tokens=False`.

        Args:
            messages: `{"role": ..., "content": ...}` mappings, oldest first.
            add_generation_prompt: end with the header that makes the model answer.
            continue_final_message: leave the last message open so that the model goes on with it.
            chat_template: Jinja2 source to use in place of the model's own.
            tools: JSON schemas of functions that the template may offer to the model.
            template_variables: whatever else the template reads.

        Raises:
            ChatTemplateError: no template, messages that the template does not take, or a
                template that fails.
        """
        from frontend.chat_template import ChatTemplateError, render_chat

        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template; pass chat_template=<Jinja2 source>, or write the "
                "prompt yourself and use generate"
            )
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **template_variables},
        )

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)
