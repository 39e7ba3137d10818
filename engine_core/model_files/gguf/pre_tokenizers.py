"""How text is cut before it is tokenized: the rules of the original models' tokenizer.json, by the
name in `tokenizer.ggml.pre`. The expressions are also in llama.cpp's llama-vocab.cpp."""

import dataclasses
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS % ("", "", r"\p{N}")
_GPT4O = _CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
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


_SPARK = (
    *_DEEPSEEK3[:2],
    _DEEPSEEK3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
    r"\p{N}",
)
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + (
    "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
)
_YOUTU = (
    "[가-힣\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a-\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    _GPT4O.replace("{1,3}", ""),
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3[2],
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
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
    return (*map(_cut_at, expressions), byte_level(use_regex=False))


def _cut_at(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _digits(*, one_by_one: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": one_by_one}


def _punctuation(behavior: str) -> dict[str, Any]:
    return {"type": "Punctuation", "behavior": behavior}


def _rule(names: str, *parts: dict[str, Any], **settings: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(parts, **settings))


_GPT2 = byte_level(use_regex=True)
_DIGITS_AND_GPT2 = (_digits(one_by_one=True), _GPT2)
_FALCON = (_punctuation("Contiguous"), _GPT2, _digits(one_by_one=False), _cut_at("[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_rule("default gpt-2 phi-2 jais gigachat exaone4 a.x-4.0 mellum trillion roberta-bpe", _GPT2),
    **_rule("jina-v1-en jina-v2-code jina-es jina-de jina-v2-es jina-v2-de granite-docling", _GPT2),
    **_rule("olmo mpt modern-bert", _GPT2, normalize_nfc=True),
    **_rule("smollm starcoder refact codeshell exaone minerva-7b mellum2", *_DIGITS_AND_GPT2),
    **_rule("command-r", *_DIGITS_AND_GPT2, normalize_nfc=True),
    **_rule("falcon", *_FALCON),
    **_rule(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        *_split(_LLAMA3), ignore_merges=True, add_bos=True,
    ),
    **_rule("dbrx smaug-bpe chatglm-bpe", *_split(_LLAMA3)),
    **_rule("glm4 glm5", *_split(_LLAMA3), ignore_merges=True),
    **_rule("jais-2", *_split(_JAIS2)),
    **_rule(
        "minicpm5", *_split(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True
    ),
    **_rule("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", *_split(_QWEN2), normalize_nfc=True),
    **_rule("stablelm2 hunyuan", *_split(_QWEN2), normalize_nfc=True),
    **_rule("grok-2 solar-open", *_split(_QWEN2)),
    **_rule("laguna", *_split(r"[^\n]+|[\n]+", _QWEN2)),
    **_rule("seed-coder", *_split(_SEED_CODER)),
    **_rule("ufakzeka", *_split(_QWEN2.removeprefix(f"{_CONTRACTIONS}|"))),
    **_rule("bailingmoe bailingmoe2 llada-moe", *_split(_BAILING)),
    **_rule("exaone-moe", *_split(_EXAONE_MOE)),
    **_rule("qwen35", *_split(_QWEN35), normalize_nfc=True),
    **_rule("tekken", *_split(_TEKKEN), ignore_merges=True, add_bos=True),
    **_rule("gpt-4o llama4 kanana2 talkie minimax-m2", *_split(_GPT4O)),
    **_rule("granite-embed-multi-97m", *_split(_GPT4O), ignore_merges=True),
    **_rule("tiny_aya cohere2moe", *_split(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **_rule("youtu", *_split(*_YOUTU), ignore_merges=True),
    **_rule("kimi-k2", *_split(_KIMI_K2)),
    **_rule("deepseek-llm", *_split(*_DEEPSEEK_LLM)),
    **_rule("deepseek-coder", *_split(*_DEEPSEEK_CODER)),
    **_rule("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_split(*_DEEPSEEK3)),
    **_rule("spark2_5", *_split(*_SPARK)),
    **_rule("afmoe", *_split(*_AFMOE)),
    **_rule("bloom poro-chat gpt3-finnish", *_split(_BLOOM)),
    **_rule("viking", _cut_at(_BLOOM), _digits(one_by_one=True), byte_level(use_regex=False)),
    **_rule("superbpe", *_split(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **_rule(
        "chameleon",
        *map(_cut_at, _CHAMELEON), _digits(one_by_one=True), _punctuation("Isolated"), _GPT2,
        add_bos=True,
    ),
}  # fmt: skip
SENTENCEPIECE_LIKE = frozenset({"gemma4", "sarvam-moe", "granite-embed-multi-311m"})
"""Spaces are made visible and the whole text is merged, as with Gemma: no byte alphabet."""
