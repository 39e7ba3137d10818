"""Perplexity of a reference and of formats on the same tokens."""

import dataclasses
import gc
import math
import shlex
import sys
import time
from typing import Any

import torch

from engine_core.model_files import open_model_files
from engine_core.options.engine import EngineOptions
from scripts.comparison.text import english_text, prefix_of, tokens_of
from scripts.quality import QualityOptions
from scripts.quality.loaded_format import FormatError, LoadedFormat, parse_options
from scripts.quality.perplexity import Window, compare, cut_windows, negative_log_likelihoods

_DEFAULT_FORMATS = ("int8:1=--quantization int8", "int4:5=--quantization int4")
_OWN_BLOCKS = "its own blocks:1="


@dataclasses.dataclass(frozen=True)
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


def measure(options: QualityOptions) -> dict[str, Any]:
    """The whole report. All options are read before anything is loaded.

    Raises:
        ValueError, TextError, ModelFilesError, StartupError: it cannot be made.
    """
    model, judge_by = options.model, options.judge_by
    common = ["--model", model]
    if options.num_threads is not None:
        common += ["--num-threads", str(options.num_threads)]
    reference_options = parse_options([*common, *shlex.split(options.reference)])
    texts = options.format
    if texts is None:
        path = open_model_files(model, report=lambda _line: None).path
        texts = (*([_OWN_BLOCKS] if path.suffix == ".gguf" else []), *_DEFAULT_FORMATS)
    formats = [Format.parse(one) for one in texts]
    their_options = [parse_options([*common, *one.options]) for one in formats]
    token_ids = tokens_of(english_text(options.text), model)
    windows = cut_windows(
        token_ids, prefix_of(model), context=options.context, num_windows=options.windows
    )
    reference_N, tokens_per_s = _measure(reference_options, windows)
    rows = [_row("reference", reference_N, model=reference_N) | {"tokens_per_s": tokens_per_s}]
    _log(rows[0])
    for one, its_options in zip(formats, their_options, strict=True):
        own_N, _ = _measure(its_options, windows, in_floats=True)
        nll_N, tokens_per_s = _measure(its_options, windows)
        row = _row(one.name, nll_N, model=reference_N, own=own_N) | {"tokens_per_s": tokens_per_s}
        if one.limit_percent is not None:
            row["limit_percent"] = one.limit_percent
            row["within_limit"] = row[f"above_{judge_by}_percent"] <= one.limit_percent
        rows.append(row)
        _log(row)
    if options.transformers:
        nll_N = _through_transformers(options.transformers, windows)
        rows.append(_row("transformers, float32", nll_N, model=reference_N))
        _log(rows[-1])
    return {
        "model": model,
        "reference": options.reference,
        "text": str(options.text or "the Python language reference"),
        "context": options.context,
        "windows": options.windows,
        "judged_by": judge_by,
        "options": {one.name: shlex.join(one.options) for one in formats},
        "formats": rows,
    }


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


def _row(name: str, nll_N: torch.Tensor, **others: torch.Tensor) -> dict[str, Any]:
    """Perplexity, and by how much it is above that of each of the others."""
    perplexity = math.exp(float(nll_N.mean()))
    row = {"name": name, "perplexity": round(perplexity, 4), "num_tokens": len(nll_N)}
    for against, other_N in others.items():
        increase, standard_error = compare(nll_N, other_N)
        row[f"above_{against}_percent"] = round(100 * increase, 4)
        row[f"above_{against}_standard_error"] = round(100 * standard_error, 4)
    return row


def _log(row: dict[str, Any]) -> None:
    text = f"{row['name']:<24}{row['perplexity']:>10.4f}"
    for against in ("model", "own"):
        if f"above_{against}_percent" in row:
            text += f"   above {against} {row[f'above_{against}_percent']:+.3f} %"
            text += f" +- {row[f'above_{against}_standard_error']:.3f}"
    if "limit_percent" in row:
        verdict = "ok" if row["within_limit"] else "NO"
        text += f"   limit {row['limit_percent']:g} %: {verdict}"
    print(text, file=sys.stderr, flush=True)
