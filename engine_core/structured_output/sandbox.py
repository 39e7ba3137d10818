"""The process that proves grammars: it compiles each, makes masks and follows tokens as the engine
will, and answers with the text that the engine compiles. What ends it ends no engine."""

import contextlib
import ctypes
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.grammars import GrammarText, reason_of
from engine_core.structured_output.tokens import PARSER_LIMITS, Setup, read_tokenizer
from protocol.sandbox import SandboxLimits, serve_sandbox
from protocol.structured_output import StructuredOutput

LIMITS = SandboxLimits(
    cpu_s=10.0,
    wall_s=25.0,
    memory_bytes=8 << 30,
    answer_bytes=16 << 20,
    stack_bytes=4 << 20,
    niceness=10,
)
PROOF_BYTES = 512 << 20
"""Beyond what the tokenizer takes."""
MAX_MASK_S = 0.1
"""Processor time of one mask."""
_POOL_STACK_BYTES = 1 << 20
"""Half of what the engine's threads for masks have."""
_WALKS, _WALK_TOKENS = 3, 32
_CLOSING = '"}],:'


def main() -> None:
    """Serve until the input ends."""
    serve_sandbox(_make, refusal=GrammarError)


def _make(data: bytes) -> Callable[[bytes], bytes]:
    os.environ["RUST_MIN_STACK"] = str(_POOL_STACK_BYTES)
    prover = Prover(msgspec.msgpack.decode(data, type=Setup))
    with contextlib.suppress(OSError, ValueError):  # macOS has neither
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + PROOF_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    asked_of = msgspec.msgpack.Decoder(StructuredOutput).decode
    return lambda request: prover.prove(asked_of(request)).encode()


class Prover:
    """Raises GrammarError: see `read_tokenizer`."""

    def __init__(self, setup: Setup) -> None:
        self._tokenizer: LLTokenizer = read_tokenizer(setup)
        self._executor = LLExecutor(1)
        self._eos = {*setup.eos_token_ids}
        self._masks = (ctypes.c_uint32 * -(-setup.vocab_size // 32) * 2)()
        self._other = self._matcher(LLMatcher.grammar_from_lark('start: "a"'))
        """A mask alone would be made on this thread, with its stack, and not on the pool's."""
        self._closing = [
            token for sign in _CLOSING for token in self._tokenizer.tokenize_str(sign)[:1]
        ]

    def prove(self, asked: StructuredOutput) -> str:
        """The grammar's text. Raises GrammarError: it cannot be used."""
        try:
            text = GrammarText(asked, self._tokenizer)
            if why := self._fault(text.text):
                raise text.error(why, self._fault)
            self._walk(text.text)
        except GrammarError as error:
            raise GrammarError(f"{error.field or asked.name} cannot be used: {error}") from None
        except Exception as error:  # of many kinds, whatever is wrong with the user's text
            raise GrammarError(f"{asked.name} cannot be used: {error!s:.400}") from error
        return text.text

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, limits=PARSER_LIMITS, log_level=0)

    def _fault(self, grammar: str) -> str:
        matcher = self._matcher(grammar)
        return matcher.get_error() if matcher.is_error() else ""

    def _walk(self, grammar: str) -> None:
        """Raises GrammarError: each walk ends where nothing can follow, or at a limit. One that
        does may have chosen a text that no model would."""
        start = self._matcher(grammar)
        ends = [self._failure(start.deep_copy(), random.Random(seed)) for seed in range(_WALKS)]
        if ends[0] is not None and None not in ends:
            begun, why = ends[0]
            if "NoExtension" not in why:
                raise GrammarError(reason_of(why)[0])
            begun = f" that begins with {begun!r:.100}" if begun else ""
            raise GrammarError(f"no text{begun} is of it; let there be one")

    def _failure(self, matcher: LLMatcher, draw: random.Random) -> tuple[str, str] | None:
        """The text behind which nothing can follow, and why."""
        tokens: list[int] = []
        while len(tokens) < _WALK_TOKENS and not matcher.is_error():
            began_s = time.process_time()
            self._executor.unsafe_compute_mask_ptr(
                [(matcher, 0), (self._other, 1)],
                ctypes.addressof(self._masks),
                ctypes.sizeof(self._masks[0]),
                2,
            )
            if (took_s := time.process_time() - began_s) > MAX_MASK_S:
                raise GrammarError(
                    f"to find which tokens may follow takes {took_s:.2f} s, the limit is "
                    f"{MAX_MASK_S:g}, as steps wait for it; make it less ambiguous and smaller"
                )
            token = self._choose(draw)
            if token is None or token in self._eos or matcher.is_error():
                break
            if matcher.consume_token(token):
                tokens.append(token)
                forced = matcher.compute_ff_tokens()
                tokens += forced if forced and matcher.consume_tokens(forced) else ()
        if not matcher.is_error():
            return None
        return self._tokenizer.decode_str(tokens), matcher.get_error()

    def _choose(self, draw: random.Random) -> int | None:
        """One of the allowed; often one that closes something."""
        words = self._masks[0]
        if draw.random() < 0.5:
            for token in self._closing:
                if words[token // 32] >> token % 32 & 1:
                    return token
        first = draw.randrange(len(words))
        mask = bytes(words)
        turned = mask[4 * first :] + mask[: 4 * first]
        place = len(turned) - len(turned.lstrip(b"\0"))
        if place == len(turned):
            return None
        bits = turned[place]
        allowed = [bit for bit in range(8) if bits >> bit & 1]
        return (8 * ((place + 4 * first) % len(turned))) + draw.choice(allowed)


if __name__ == "__main__":
    main()
