"""Perplexity of a reference and of formats on the same tokens: exp of the mean negative
log-probability of a text's tokens."""

import dataclasses
import gc
import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_core.cli import app
from engine_core.model_files import open_model_files
from engine_core.model_runner.cache import PagedKVCache
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from engine_core.startup.device import choose_device
from engine_core.startup.model import load_any_model
from engine_core.startup.resolve import plan_runner
from frontend.load.report import log
from kernels.cpu.linear import PackedParts
from kernels.cpu.weights import PackedLinear
from kernels.interface.operations import Operations
from kernels.interface.weights import LinearWeight
from scripts.comparison.text import english_text, prefix_of, tokens_of
from scripts.quality import QualityOptions

_DEFAULT_FORMATS = ("int8:1=--quantization int8", "int4:5=--quantization int4")
_OWN_BLOCKS = "its own blocks:1="
_ROWS_AT_ONCE = 128
"""Logits of so many positions are in memory at one time: a vocabulary may have 262,144 entries."""

Forward = Callable[[list[int]], torch.Tensor]
"""Tokens of one sequence -> hidden_TE."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""hidden_RE -> float32 logits_RV."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A piece of the text as a sequence of its own.

    tokens   p p t t t t        p: what the tokenizer begins a text with; t: the text's
    scored       _ x x x        without a p, the first token has nothing before it
    """

    tokens: list[int]
    first_scored: int


def cut_windows(
    text_token_ids: Sequence[int], prefix: Sequence[int], *, context: int, num_windows: int
) -> list[Window]:
    """Windows spread evenly over the text, which do not overlap. Raises ValueError: the text is too
    short for so many, or a window too short to score a token."""
    length = context - len(prefix)
    if length < 2:
        raise ValueError(f"a context of {context} tokens leaves none to score; use 64 or more")
    if num_windows < 1 or num_windows * length > len(text_token_ids):
        raise ValueError(
            f"the text has {len(text_token_ids)} tokens, {num_windows} windows of {length} need "
            f"{num_windows * length} and at least one; use fewer or shorter windows, or a longer "
            "text"
        )
    stride = len(text_token_ids) // num_windows
    starts = range(0, stride * num_windows, stride)
    first = max(len(prefix), 1)
    return [Window([*prefix, *text_token_ids[at : at + length]], first) for at in starts]


@torch.inference_mode()
def negative_log_likelihoods(
    windows: Sequence[Window], forward: Forward, logits_of: Logits
) -> torch.Tensor:
    """float64 [number of scored tokens], natural logarithms, in the windows' order. Raises
    ValueError: a value is not finite."""
    found = []
    for window in windows:
        hidden_TE = forward(window.tokens)
        # the row of token t predicts token t + 1
        for start in range(window.first_scored - 1, len(window.tokens) - 1, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(window.tokens) - 1)
            logits_RV = logits_of(hidden_TE[start:stop].contiguous()).double()
            wanted_R1 = torch.tensor(window.tokens[start + 1 : stop + 1])[:, None]
            found.append(logits_RV.logsumexp(-1) - logits_RV.gather(-1, wanted_R1)[:, 0])
    together = torch.cat(found)
    if not bool(together.isfinite().all()):
        raise ValueError(f"{int((~together.isfinite()).sum())} log-probabilities are not finite")
    return together


def compare(nll_N: torch.Tensor, reference_N: torch.Tensor) -> tuple[float, float]:
    """The increase of the perplexity as a share of the reference's (0.01 is one in a hundred), and
    its standard error from the differences of single tokens. Both are negative log-likelihoods of
    the same windows."""
    difference_N = nll_N - reference_N
    ratio = math.exp(float(difference_N.mean()))
    error = float(difference_N.std()) / math.sqrt(len(difference_N))
    return ratio - 1, ratio * error


def parse_options(words: Sequence[str]) -> EngineOptions:
    """The daemon's own reading of its command line. Raises ValueError: an option that it does not
    know or refuses."""
    try:
        _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
        options = bound.arguments.get("options")
        if isinstance(options, EngineOptions):
            check_options(options)
            options.scheduling.check()
            return options
    except Exception as error:  # cyclopts has many kinds
        raise ValueError(" ".join(str(error).split())) from error
    raise ValueError(f"{' '.join(words)!r} names no model")


class FloatProducts:
    """In the place of a backend's `linear`: float32 products of dequantised weights."""

    def __init__(self, ops: Operations) -> None:
        self._ops, self._packed_product = ops, ops.linear
        self._floats: dict[int, tuple[LinearWeight, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if not isinstance(weight, PackedLinear | PackedParts):
            return self._packed_product(x_TE, weight)
        if id(weight) not in self._floats:  # the weight is kept, so that its id stays its own
            nothing_1E = torch.zeros(1, weight.num_inputs)
            bias_N = self._packed_product(nothing_1E, weight)[0].clone()
            self._floats[id(weight)] = (weight, self._dequantised(weight), bias_N)
        _, weight_NE, bias_N = self._floats[id(weight)]
        return torch.nn.functional.linear(x_TE, weight_NE, bias_N)

    def _dequantised(self, weight: PackedLinear | PackedParts) -> torch.Tensor:
        parts = weight.parts if isinstance(weight, PackedParts) else (weight,)
        rows = [self._ops.embedding(torch.arange(part.num_outputs), part) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class LoadedFormat:
    """
    Args:
        max_tokens: of a sequence.
        in_floats: multiply by the numbers that the weights stand for, in float32 throughout: what
            is left of a difference is the weights', not the arithmetic's.
    """

    def __init__(self, options: EngineOptions, *, max_tokens: int, in_floats: bool = False) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        files = open_model_files(str(options.model), report=lambda _line: None)
        loaded = load_any_model(options, files, choose_device(options, files)[0])
        self._model, ops = loaded.model, loaded.ops
        if in_floats:
            # layers hold the backend, so its products are replaced where all find them
            setattr(ops, "linear", FloatProducts(ops))  # noqa: B010
        planned = plan_runner(dataclasses.replace(options, max_model_len=None), files, loaded)
        self._blocks_GM = torch.arange(
            1, planned.config.num_groups * -(-max_tokens // options.block_size) + 1
        ).view(planned.config.num_groups, -1)
        self._block_size = options.block_size
        self._cache = PagedKVCache(
            dataclasses.replace(
                planned.config,
                num_blocks=self._blocks_GM.numel(),
                max_num_seqs=1,
                max_num_batched_tokens=max_tokens,
                max_model_len=max_tokens,
            )
        )
        self.compute_logits = loaded.model.compute_logits

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """hidden_TE of one sequence, from its first token on."""
        num_tokens = len(token_ids)
        positions_T = torch.arange(num_tokens)
        context = self._cache.forward_context(
            query_start_loc_R1=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens_R=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables_GRM=self._blocks_GM.int()[:, None],
            slot_mappings_GT=self._blocks_GM[:, :1] * self._block_size + positions_T,
            num_decodes=0,
        )
        return self._model.forward(torch.tensor(token_ids), positions_T, context)


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
        """`NAME[:PERCENT]=OPTIONS`. Raises ValueError: it is written otherwise."""
        found = re.fullmatch(r"([^:=]+)(?::([0-9.]+))?=(.*)", text)
        if found is None:
            raise ValueError(f"{text!r} is no format; write NAME[:PERCENT]=OPTIONS")
        name, limit, options = found.groups()
        return cls(name, None if limit is None else float(limit), tuple(shlex.split(options)))


def measure(options: QualityOptions) -> dict[str, Any]:
    """The whole report. All options are read before anything is loaded. Raises ValueError,
    ModelFilesError, StartupError: it cannot be made."""
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
    log(text)
