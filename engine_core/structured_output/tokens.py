"""A model's tokens for llguidance, the same for the process that proves a grammar and for the one
that uses it."""

import msgspec
from llguidance import LLParserLimits, LLTokenizer

from engine_core.structured_output.grammar_error import GrammarError

PARSER_LIMITS = LLParserLimits(
    max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False
)


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """See `GrammarCompiler`."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_tokenizer(setup: Setup) -> LLTokenizer:
    """Raises GrammarError."""
    if not setup.eos_token_ids:
        raise GrammarError("the model has no end-of-sequence token, so no grammar could end")
    try:
        return LLTokenizer(
            setup.tokenizer_json.decode(),
            n_vocab=setup.vocab_size,
            eos_token=list(setup.eos_token_ids),
        )
    except Exception as error:
        raise GrammarError(
            f"this model's tokenizer cannot be used for structured_outputs: {error!s:.400}"
        ) from error
