"""The prompts of llama.cpp's API in tokens."""

import functools
from collections.abc import Callable
from typing import Any

from frontend.http.api_errors import ApiError
from frontend.http.llama_cpp.bodies import InfillRequest
from frontend.input_processor import InputProcessor
from frontend.inputs.fim import fim_format, text_ids
from frontend.text.long_texts import check_chars

_MAX_PROMPTS = 1024
_BATCH = 2048
"""llama.cpp's `--batch-size`: as many tokens around the gap are kept, three quarters before it."""
_LEAST_ANSWER = 128
_REPO, _FILE = "myproject\n", "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"


def read_prompts(processor: InputProcessor, given: Any) -> list[list[int]]:
    """The tokens of each prompt. Raises ApiError, InvalidInput: what is none."""
    is_one = not isinstance(given, list) or any(isinstance(each, int) for each in given)
    prompts = [given] if is_one else given
    if not 0 < len(prompts) <= _MAX_PROMPTS:
        what = f"there are {len(prompts)} prompts, give 1 to {_MAX_PROMPTS}"
        raise ApiError(400, what, param="prompt")
    return [_tokens(processor, each) for each in prompts]


def _tokens(processor: InputProcessor, given: Any) -> list[int]:
    if isinstance(given, dict):
        if given.keys() - {"prompt_string"} and given.get("multimodal_data"):
            what = "multimodal_data is not supported; send images to /v1/chat/completions"
            raise ApiError(400, what, param="prompt")
        given = given.get("prompt_string")
    encode = processor.encode
    return _mixed(given, encode, functools.partial(encode, add_special_tokens=False))


def _mixed(
    given: Any, first: Callable[[str], list[int]], later: Callable[[str], list[int]]
) -> list[int]:
    """Tokens of texts and tokens; `first` reads a text that begins them, `later` any other."""
    token_ids: list[int] = []
    for index, part in enumerate(given if isinstance(given, list) else [given]):
        if isinstance(part, str):
            token_ids += (later if index else first)(part)
        elif isinstance(part, int) and not isinstance(part, bool):
            token_ids.append(part)
        else:
            what = f"a prompt holds {part!r:.100}, it must be texts and tokens"
            raise ApiError(400, what, param="prompt")
    return token_ids


def infill_prompt(processor: InputProcessor, asked: InfillRequest) -> list[int]:
    """The files beside, then the text around the gap; both are shortened as llama.cpp does it, to a
    batch around the gap and to what the context leaves beside that and two answers.
    Raises InvalidInput: the model has no tokens for that."""
    tokenizer, length = processor.tokenizer, processor.model.max_model_len
    known = fim_format(tokenizer, processor.model.name)

    def read(text: str, *, goes_on: bool = False) -> list[int]:
        check_chars(len(text), "a text of the prompt", length, is_cut=True)
        return text_ids(tokenizer, text, goes_on=goes_on)

    goes_on = functools.partial(read, goes_on=True)
    prefix = _mixed(asked.input_prefix, read, goes_on)
    suffix = _mixed(asked.input_suffix, goes_on, goes_on)
    prompt = goes_on(asked.prompt)
    extra = [] if known.repo is None else [known.repo, *read(_REPO)]
    for each in asked.input_extra:
        named = None if known.file is None else [known.file, *read(f"{each.filename}\n")]
        extra += (named or read(_SNIPPET)) + read(each.text)
    if known.file is not None:
        extra += [known.file, *read(_FILE)]
    num_answer = max(asked.n_predict or 0, 8) if asked.n_predict else _LEAST_ANSWER
    batch = max(4, min(_BATCH, length - num_answer - 8))
    room = max(0, length - batch - 2 * num_answer)
    return known.joined(
        prefix[-3 * (batch // 4) :] + prompt,
        suffix[: max(0, batch // 4 - 2 - len(prompt))],
        before=extra[max(0, len(extra) - room) :],
    )
