"""What weights of fewer bits cost in quality: perplexity on a real text, format by format.

    python scripts/measure_quality.py --model smollm2-135m-instruct
    python scripts/measure_quality.py --model gemma3-270m --format "int8:1=--quantization int8"

A format is the daemon's options; each is compared on the same tokens of English text (the reference
of the Python language, which comes with Python, or `--text FILE`) with two others:
    model   `--reference`, the model in float32: all that the format costs
    own     the numbers that the format's own weights stand for, in float32 arithmetic: what its
            arithmetic costs, activations in 8 bits above all
A table goes to stderr, one JSON document to stdout. Exit code 0, 1 if a format is beyond its limit,
2 for wrong options.
"""

import argparse
import dataclasses
import gc
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from engine_core.errors import StartupError
from engine_core.model_files import ModelFilesError
from engine_core.options.engine import EngineOptions
from scripts.comparison.text import NoText, english_text, prefix_of, tokens_of
from scripts.load.report import describe_run
from scripts.quality.loaded_format import FormatError, LoadedFormat, parse_options
from scripts.quality.perplexity import (
    Quality,
    Window,
    compare,
    cut_windows,
    negative_log_likelihoods,
)

_DEFAULT_FORMATS = ("int8:1=--quantization int8", "int4:5=--quantization int4")
_OWN_BLOCKS = "its own blocks:1="


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """
    Attributes:
        limit_percent: most that its perplexity may be above what it is judged by; None: any.
        options: the daemon's, as words.
    """

    name: str
    limit_percent: float | None
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Format":
        """`NAME[:PERCENT]=OPTIONS`.

        Raises:
            FormatError: it is written otherwise.
        """
        described, equals, options = text.partition("=")
        name, _, limit = described.partition(":")
        try:
            limit_percent = float(limit) if limit else None
        except ValueError:
            limit_percent = math.nan
        if not equals or not name or (limit_percent is not None and math.isnan(limit_percent)):
            raise FormatError(f"{text!r} is no format; write NAME[:PERCENT]=OPTIONS")
        return cls(name, limit_percent, tuple(shlex.split(options)))


def main(arguments: list[str]) -> int:
    """Exit code for the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--format",
        action="append",
        help="NAME[:PERCENT]=OPTIONS; may be repeated; default: int8 within 1 percent, int4 within "
        "5, and a GGUF's own blocks within 1",
    )
    parser.add_argument("--reference", default="--dtype float32", help="the daemon's options")
    parser.add_argument(
        "--judge-by", choices=("model", "own"), default="own", help="what limits are against"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument(
        "--transformers", help="a model folder to cross-check the reference with transformers"
    )
    parser.add_argument("--json", type=Path, help="write the document here too")
    given = parser.parse_args(arguments)
    try:
        document = measure(given)
    except (FormatError, NoText, ValueError, ModelFilesError, StartupError) as error:
        print(f"measure_quality: {error}", file=sys.stderr)
        return 2
    line = json.dumps(document)
    if given.json:
        given.json.write_text(line + "\n")
    print(line)
    return 0 if all(row.get("within_limit", True) for row in document["formats"]) else 1


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The whole report. All options are read before anything is loaded.

    Raises:
        FormatError, NoText, ValueError, ModelFilesError, StartupError: it cannot be made.
    """
    threads = [] if given.num_threads is None else ["--num-threads", str(given.num_threads)]
    common = ["--model", given.model, *threads]
    reference = parse_options([*common, *shlex.split(given.reference)])
    asked = given.format or _default_formats(given.model)
    formats = [Format.parse(one) for one in asked]
    options = [parse_options([*common, *one.options]) for one in formats]
    token_ids = tokens_of(english_text(given.text), given.model)
    windows = cut_windows(
        token_ids, prefix_of(given.model), context=given.context, num_windows=given.windows
    )
    reference_N, tokens_per_s = _measure(reference, windows)
    rows = [_row("reference", reference_N, reference_N) | {"tokens_per_s": tokens_per_s}]
    _say(rows[0])
    for one, its_options in zip(formats, options, strict=True):
        own_N, _ = _measure(its_options, windows, in_floats=True)
        nll_N, tokens_per_s = _measure(its_options, windows)
        row = _row(one.name, nll_N, reference_N, own_N) | {"tokens_per_s": tokens_per_s}
        rows.append(row | _verdict(one, row, given.judge_by))
        _say(rows[-1])
    if given.transformers:
        nll_N = _through_transformers(given.transformers, windows)
        rows.append(_row("transformers, float32", nll_N, reference_N))
        _say(rows[-1])
    return describe_run() | {
        "model": given.model,
        "reference": given.reference,
        "text": str(given.text or "the Python language reference"),
        "context": given.context,
        "windows": given.windows,
        "judged_by": given.judge_by,
        "options": {one.name: shlex.join(one.options) for one in formats},
        "formats": rows,
    }


def _default_formats(model: str) -> list[str]:
    from engine_core.model_files import open_model_files

    path = open_model_files(model, report=lambda _line: None).path
    return [*([_OWN_BLOCKS] if path.suffix == ".gguf" else []), *_DEFAULT_FORMATS]


def _measure(
    options: EngineOptions, windows: list[Window], *, in_floats: bool = False
) -> tuple[torch.Tensor, float]:
    """Negative log-likelihoods, and tokens a second."""
    gc.collect()  # of the format before
    longest = max(len(window.tokens) for window in windows)
    loaded = LoadedFormat(options, max_tokens=longest, in_floats=in_floats)
    started_s = time.perf_counter()
    nll_N = negative_log_likelihoods(windows, loaded.forward, loaded.compute_logits)
    return nll_N, round(len(nll_N) / (time.perf_counter() - started_s), 1)


def _through_transformers(folder: str, windows: list[Window]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def forward(tokens: list[int]) -> torch.Tensor:
        output: torch.Tensor = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
        return output

    return negative_log_likelihoods(windows, forward, model.lm_head)


def _row(
    name: str,
    nll_N: torch.Tensor,
    reference_N: torch.Tensor,
    own_N: torch.Tensor | None = None,
) -> dict[str, Any]:
    found = compare(nll_N, reference_N)
    row = {"name": name, "perplexity": round(found.perplexity, 4), "num_tokens": found.num_tokens}
    row |= _increase("model", found)
    return row if own_N is None else row | _increase("own", compare(nll_N, own_N))


def _increase(against: str, found: Quality) -> dict[str, float]:
    return {
        f"above_{against}_percent": round(100 * found.increase, 4),
        f"above_{against}_standard_error": round(100 * found.standard_error, 4),
    }


def _verdict(one: Format, row: dict[str, Any], judge_by: str) -> dict[str, Any]:
    if one.limit_percent is None:
        return {}
    within = row[f"above_{judge_by}_percent"] <= one.limit_percent
    return {"limit_percent": one.limit_percent, "within_limit": within}


def _say(row: dict[str, Any]) -> None:
    text = f"{row['name']:<24}{row['perplexity']:>10.4f}"
    for against in ("model", "own"):
        if f"above_{against}_percent" in row:
            text += f"   above {against} {row[f'above_{against}_percent']:+.3f} %"
            text += f" +- {row[f'above_{against}_standard_error']:.3f}"
    if "limit_percent" in row:
        verdict = "ok" if row["within_limit"] else "NO"
        text += f"   limit {row['limit_percent']:g} %: {verdict}"
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
