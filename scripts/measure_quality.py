"""What weights of fewer bits cost in quality: perplexity on a real text, format by format.

    python scripts/measure_quality.py --model smollm2-135m-instruct
    python scripts/measure_quality.py --format "int8:1=--quantization int8"

A format is the daemon's options; each is compared on the same tokens of English text (the reference
of the Python language, which comes with Python, or --text FILE) with two others:
    model   --reference, the model in float32: all that the format costs
    own     the numbers that the format's own weights stand for, in float32:
            what its arithmetic costs, activations in 8 bits above all

A table goes to stderr, one JSON document to stdout. Exit code 0, 1 if a format is beyond its limit,
2 for wrong options.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core.errors import StartupError
from engine_core.model_files import ModelFilesError
from frontend.load.report import describe_run, write_document
from scripts.command_line import make_app, run_app
from scripts.quality import QualityOptions

app = make_app("measure_quality", __doc__)


@app.default
def measure_quality(options: QualityOptions | None = None) -> int:
    """Measure the quality of formats."""
    from scripts.quality.measurement import measure

    options = options or QualityOptions()
    figures = measure(options)
    write_document(describe_run() | figures, options.json)
    return 0 if all(row.get("within_limit", True) for row in figures["formats"]) else 1


main = functools.partial(run_app, app, refused=(ValueError, ModelFilesError, StartupError))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
