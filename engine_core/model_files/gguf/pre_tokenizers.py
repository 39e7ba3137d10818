"""How text is cut before byte-level merges, by the name in `tokenizer.ggml.pre`: the rules of
the original models' tokenizer.json (the expressions are also in llama.cpp's llama-vocab.cpp)."""

import dataclasses
from typing import Any

_Json = dict[str, Any]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS % ("", "", r"\p{N}")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED_WORDS % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """
    Attributes:
        parts: `tokenizers` pre-tokenizers in JSON, applied in turn.
        normalize_nfc: text is brought to Unicode form C first.
        ignore_merges: a piece that is a token of its own is never built from merges.
        add_bos: what holds where the file says nothing of `add_bos_token`.
    """

    parts: tuple[_Json, ...]
    normalize_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self) -> _Json:
        """The `pre_tokenizer` of a tokenizer.json."""
        if len(self.parts) == 1:
            return self.parts[0]
        return {"type": "Sequence", "pretokenizers": list(self.parts)}


def byte_level(*, use_regex: bool) -> _Json:
    """As a pre-tokenizer; as a decoder, only the type counts."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(*expressions: str) -> tuple[_Json, ...]:
    splits = tuple(
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in expressions
    )
    return (*splits, byte_level(use_regex=False))


_GPT2_RULE = PreTokenizer((byte_level(use_regex=True),))
_DIGITS_RULE = PreTokenizer(
    ({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))
)
_LLAMA3_RULE = PreTokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreTokenizer(_split(_QWEN2), normalize_nfc=True)
_GPT4O_RULE = PreTokenizer(_split(_GPT4O))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "jais", "gigachat"), _GPT2_RULE),
    "olmo": dataclasses.replace(_GPT2_RULE, normalize_nfc=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS_RULE
    ),
    "command-r": dataclasses.replace(_DIGITS_RULE, normalize_nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3_RULE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_split(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2_RULE),
    "stablelm2": PreTokenizer(_split(_QWEN2)),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_RULE),
    "deepseek-coder": PreTokenizer(_split(*_DEEPSEEK_CODER)),
    "deepseek-v3": PreTokenizer(_split(*_DEEPSEEK3)),
}
