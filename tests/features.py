"""Counts the features that each file names, in `make imports`; fails where a number is above its
limit: one more feature is a file of its own, and not a line in each hub.

A file names a feature if one of its identifiers does. startup/ and options/ list features, the
wire's messages are made of them, and a replay does again what each of them did."""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")

FEATURES = {
    "adapters": r"adapter|lora",
    "drafts": r"draft|specul|spec_(token|decode)|proposer|eagle",
    "grammars": r"grammar|constrain|structured|guided|token_?masks",
    "pooling": r"pool(ing|ed|er|s_all)",
    "encoders": r"encoder|multi_?modal|mm_",
    "prompt embeds": r"embeds|embedded",
    "prompt logprobs": r"prompt_?logprobs",
    "logprobs": r"(?<!prompt_)(?<!prompt)logprobs",
    "logits processors": r"logits_?processor",
    "beams": r"beam",
    "forks": r"fork",
    "swapping": r"swap|offload",
    "prefix cache": r"prefix_?(cache|store)|cached_?prefix|cache_?lookup",
    "stages": r"pipeline|micro_?batch|num_stages",
    "ranks": r"tensor_?parallel|(?<![a-z])rank|shard",
    "sleep": r"sleep|wake_up",
    "new weights": r"(update|use|new|load)_?weights|weights_?(version|update)|reload",
    "deadlines": r"deadline|timeout_s|expired",
    "priorities": r"priorit",
    "explanations": r"expla(in|nation)|waitreason|trace",
}
MOST_FEATURES = 7
EXEMPT = (
    "protocol/",
    "engine_core/startup/",
    "engine_core/options/",
    "frontend/simulator/replay.py",
)


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def features_of(path: Path) -> list[str]:
    """Those that an identifier of the file names."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return [
        feature
        for feature, pattern in FEATURES.items()
        if any(map(re.compile(pattern, re.IGNORECASE).search, names))
    ]


def check_features() -> Iterator[str]:
    for path in sources():
        name = name_of(path)
        if name.startswith(EXEMPT):
            continue
        if len(found := features_of(path)) > MOST_FEATURES:
            names = ", ".join(found)
            yield f"{name} names {len(found)} features, the limit is {MOST_FEATURES}: {names}"


def main() -> int:
    faults = list(check_features())
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
