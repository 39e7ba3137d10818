"""How text is cut before it is tokenized: the rules of the original models' tokenizer.json, by the
name in `tokenizer.ggml.pre`. The expressions are also in llama.cpp's llama-vocab.cpp."""

import dataclasses
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS % ("", "", r"\p{N}")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED_WORDS % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}")
_WITHOUT_HAN = _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]*", "]*")
_KIMI_K2 = rf"[\p{{Han}}]+|{_WITHOUT_HAN}"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters of two cases, as DeepSeek's first tokenizers list them."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    parts: tuple[dict[str, Any], ...]
    """`tokenizers` pre-tokenizers in JSON, applied in turn."""
    normalize_nfc: bool = False
    """Text is brought to Unicode form C first."""
    ignore_merges: bool = False
    """A piece that is a token of its own is never built from merges."""
    add_bos: bool = False
    """The value where the file says nothing of `add_bos_token`."""

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json."""
        if len(self.parts) == 1:
            return self.parts[0]
        return {"type": "Sequence", "pretokenizers": list(self.parts)}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """A byte-level pre-tokenizer; of a decoder only the type counts."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(*expressions: str) -> tuple[dict[str, Any], ...]:
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
    "roberta-bpe": _GPT2_RULE,
    **dict.fromkeys(("olmo", "modern-bert"), dataclasses.replace(_GPT2_RULE, normalize_nfc=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS_RULE
    ),
    "command-r": dataclasses.replace(_DIGITS_RULE, normalize_nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3_RULE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_split(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2_RULE),
    "qwen35": PreTokenizer(_split(_QWEN35), normalize_nfc=True),
    **dict.fromkeys(("stablelm2", "hunyuan"), PreTokenizer(_split(_QWEN2))),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_RULE),
    "kimi-k2": PreTokenizer(_split(_KIMI_K2)),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_split(_LLAMA3), ignore_merges=True)),
    "deepseek-llm": PreTokenizer(_split(*_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(_split(*_DEEPSEEK_CODER)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_split(*_DEEPSEEK3))),
}
