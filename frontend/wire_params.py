"""Sampling parameters as the engine takes them: those that are said in text become tokens."""

from collections.abc import Sequence

from msgspec.structs import replace

from frontend.errors import InvalidInput
from frontend.reasoning_formats import ReasoningFormat, reasoning_format_of_template
from frontend.sampling_params import SamplingParams, as_invalid_input
from frontend.structured_outputs import behind_reasoning
from frontend.text.sampler_chain import breaker_tokens
from frontend.text.tokenizer import Tokenizer, needed
from protocol.outputs import ModelInfo
from protocol.sampling import SamplingParams as WireSamplingParams
from protocol.sampling import ThinkingBudget

_MARKER_TOKENS = 16
"""As many of a prompt's last tokens show whether it ends in a block of reasoning."""


def wire_params_of(
    params: SamplingParams,
    prompt: Sequence[int],
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    reasoning: ReasoningFormat | None,
    seed: int,
) -> WireSamplingParams:
    """
    Args:
        prompt: its tokens.
        reasoning: what may stand before an answer that follows a grammar.

    Raises:
        InvalidInput: this model cannot serve them.
    """
    if params.stop_strings and tokenizer is None:
        raise InvalidInput(
            "stop strings need text, and the engine's model came without a tokenizer; use "
            "stop_token_ids"
        )
    wire = params.to_wire(len(prompt), model.max_model_len, seed=seed, vocab_size=model.vocab_size)
    asked = wire.structured_output
    if asked is not None and (asked.reasoning or reasoning):
        end = needed(tokenizer).decode(prompt[-_MARKER_TOKENS:], skip_special_tokens=False)
        wire = replace(wire, structured_output=behind_reasoning(asked, reasoning, end))
    if params.bad_words:
        wire = replace(wire, bad_words=bad_word_ids(params.bad_words, needed(tokenizer)))
    chain, breakers = wire.chain, params.dry_sequence_breakers
    if chain is not None and chain.dry_multiplier > 0.0 and breakers != []:
        with as_invalid_input():
            found = breaker_tokens(breakers, needed(tokenizer))
            wire = replace(wire, chain=replace(chain, dry_breakers=found))
    if params.thinking_token_budget is not None:
        budget = params.thinking_token_budget
        wire = replace(wire, thinking=thinking_budget(budget, needed(tokenizer)))
    if model.encoder is not None and model.encoder.rules is not None:
        wire = replace(wire, generation_rules=model.encoder.rules)
    return wire


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and those of the word behind a space if they are as many and begin
    with another: as vLLM has it.
    Raises InvalidInput: a word has no tokens."""
    found: list[tuple[int, ...]] = []
    for word in words:
        start, behind_space = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not start:
            raise InvalidInput(f"bad_words holds {word!r}, which has no tokens; remove it")
        found.append(start)
        if len(behind_space) == len(start) and behind_space[0] != start[0]:
            found.append(behind_space)
    return tuple(found)


def thinking_budget(budget: int, tokenizer: Tokenizer) -> ThinkingBudget:
    """Raises InvalidInput: how the model marks its reasoning is not known."""
    found = reasoning_format_of_template(tokenizer.chat_template or "")
    markers = () if found is None else (found.start, found.end)
    token_ids = [tokenizer.encode(marker, add_special_tokens=False) for marker in markers]
    if not token_ids or any(len(marker) != 1 for marker in token_ids):
        raise InvalidInput(
            f"thinking_token_budget is {budget}, and this model's chat template has no markers of "
            "reasoning that are one token each; omit it"
        )
    return ThinkingBudget(
        max_tokens=budget, start_token_id=token_ids[0][0], end_token_id=token_ids[1][0]
    )
