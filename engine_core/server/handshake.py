"""The answer to a HELLO: what a client must know of the model, and the tokenizer."""

import hashlib
import secrets

import msgspec

from engine_core.server.transport import Frame
from protocol.base import WIRE_VERSION
from protocol.outputs import ModelInfo, TokenizerInfo, Welcome
from protocol.requests import Hello, TensorRef


class Handshake:
    """
    Args:
        model: what clients are sent, without the tokenizer.
        tokenizer: likewise, without its document; None if the model has none.
        tokenizer_json: the `tokenizers` document.
        heartbeat_s: longest time between two messages to a client.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        tokenizer: TokenizerInfo | None,
        tokenizer_json: bytes,
        heartbeat_s: float,
    ) -> None:
        bare = msgspec.structs.replace(model, tokenizer=tokenizer)
        self._without_document = Welcome(
            wire_version=WIRE_VERSION,
            engine_id=secrets.token_hex(8),
            heartbeat_s=heartbeat_s,
            model=bare,
        )
        self._with_document = self._without_document
        self._frames: list[Frame] = []
        if tokenizer is not None:
            document = TensorRef(frame=0, dtype="uint8", shape=(len(tokenizer_json),))
            full = msgspec.structs.replace(tokenizer, tokenizer_json=document)
            self._with_document = msgspec.structs.replace(
                self._without_document, model=msgspec.structs.replace(bare, tokenizer=full)
            )
            self._frames = [tokenizer_json]

    def welcome(self, hello: Hello) -> tuple[Welcome, list[Frame]]:
        """The message and the binary frames behind it."""
        if hello.wants_tokenizer:
            return self._with_document, self._frames
        return self._without_document, []


def fingerprint_of(document: bytes) -> str:
    """A name for the tokenizer: equal documents, equal names."""
    return hashlib.sha256(document).hexdigest()[:32]
