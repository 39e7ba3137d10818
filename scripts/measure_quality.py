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

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command_line import make_app, run_app
from scripts.load.report import describe_run, write_document

app = make_app("measure_quality", __doc__)


def _help(text: str) -> Parameter:
    return Parameter(help=text, negative="", allow_leading_hyphen=True, consume_multiple=False)


@app.default
def measure_quality(
    *,
    model: str = "smollm2-135m-instruct",
    format: Annotated[
        list[str] | None,
        _help(
            "NAME[:PERCENT]=OPTIONS; may be repeated; default: int8 within 1 percent, int4 within "
            "5, and a GGUF's own blocks within 1."
        ),
    ] = None,
    reference: Annotated[str, _help("The daemon's options.")] = "--dtype float32",
    judge_by: Annotated[Literal["model", "own"], _help("What limits are against.")] = "own",
    context: Annotated[int, _help("Tokens of a window.")] = 512,
    windows: int = 24,
    text: Path | None = None,
    num_threads: int | None = None,
    transformers: Annotated[
        str | None, _help("A model folder to cross-check the reference with transformers.")
    ] = None,
    json: Annotated[Path | None, _help("Write the document here too.")] = None,
) -> int:
    """Measure the quality of formats."""
    from engine_core.errors import StartupError
    from engine_core.model_files import ModelFilesError
    from scripts.comparison.text import TextError
    from scripts.quality.measurement import measure

    try:
        figures = measure(
            model=model,
            formats=format,
            reference=reference,
            judge_by=judge_by,
            context=context,
            num_windows=windows,
            text=text,
            num_threads=num_threads,
            transformers_folder=transformers,
        )
    except (TextError, ModelFilesError, StartupError) as error:
        raise ValueError(str(error)) from error
    write_document(describe_run() | figures, json)
    return 0 if all(row.get("within_limit", True) for row in figures["formats"]) else 1


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    return run_app(app, arguments, refused=(ValueError,))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
