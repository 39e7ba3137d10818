"""The answer to a HELLO: what a client must know of the model, and the tokenizer."""

import hashlib
import secrets

from msgspec.structs import replace

from engine_core.model_files.interface import TokenizerFiles
from engine_core.server.transport import Frame
from protocol.base import WIRE_VERSION
from protocol.outputs import ModelInfo, TokenizerInfo, Welcome
from protocol.requests import Hello, TensorRef


class Handshake:
    """
    Args:
        model: what clients are sent, without the tokenizer.
        tokenizer: None if the model has none.
        heartbeat_s: longest time between two messages to a client.
    """

    def __init__(
        self, model: ModelInfo, tokenizer: TokenizerFiles | None, *, heartbeat_s: float
    ) -> None:
        self._welcome = Welcome(WIRE_VERSION, secrets.token_hex(8), heartbeat_s, model)
        self._document = b""
        if tokenizer is not None:
            self._document = tokenizer.tokenizer_json
            info = TokenizerInfo(
                fingerprint=hashlib.sha256(self._document).hexdigest()[:32],
                tokenizer_json=None,
                chat_template=tokenizer.chat_template,
                special_tokens=tokenizer.special_tokens,
            )
            self._welcome = replace(self._welcome, model=replace(model, tokenizer=info))

    def welcome(self, hello: Hello) -> tuple[Welcome, list[Frame]]:
        """The message and the binary frames behind it."""
        model = self._welcome.model
        if not hello.wants_tokenizer or model.tokenizer is None:
            return self._welcome, []
        document = TensorRef(frame=0, dtype="uint8", shape=(len(self._document),))
        full = replace(model, tokenizer=replace(model.tokenizer, tokenizer_json=document))
        return replace(self._welcome, model=full), [self._document]
