"""The quality of formats: models by the daemon's options, and the perplexity of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def _help(text: str) -> Parameter:
    return Parameter(help=text, negative="", allow_leading_hyphen=True, consume_multiple=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    model: str = "smollm2-135m-instruct"
    format: Annotated[
        tuple[str, ...] | None,
        _help(
            "NAME[:PERCENT]=OPTIONS; may be repeated; default: int8 within 1 percent, int4 within "
            "5, and a GGUF's own blocks within 1."
        ),
    ] = None
    reference: Annotated[str, _help("The daemon's options.")] = "--dtype float32"
    judge_by: Annotated[Literal["model", "own"], _help("What limits are against.")] = "own"
    context: Annotated[int, _help("Tokens of a window.")] = 512
    windows: int = 24
    text: Path | None = None
    num_threads: int | None = None
    json: Annotated[Path | None, _help("Write the document here too.")] = None
