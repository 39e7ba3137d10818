"""Benchmarks of this machine. A table goes to stderr, one JSON document to stdout as the last line.

    python scripts/bench.py scheduler
    python scripts/bench.py startup --options "--dtype float32"
    python scripts/bench.py parallel --ways "-tp 3" "-pp 2"
    python scripts/bench.py cpu-kernels --rows 1 64 --kinds float32 int8
    python scripts/bench.py embeddings --folder FOLDER --peers PYTHON

`--help` lists the commands. Exit code 0, 1 if something failed, 2 for wrong options.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command_line import make_app, run_app

app = make_app("bench", __doc__)
for name, text in {
    "scheduler": "Microseconds that the scheduler takes; no model and no torch.",
    "growth": "How a step and a request grow with what the engine holds.",
    "startup": "From launch to ready and to the first token, and the daemon's memory.",
    "restart": "Time to first token after kill -9, with and without --prefix-cache-dir.",
    "isolation": "What the time to the first token tells of another tenant's prompts.",
    "parallel": "Workers of a share of the cores beside one of all, and their collectives.",
    "http": "CPU time of a streamed token: in the client library, and over HTTP.",
    "speculation": "With drafts and without, on copy-heavy prompts and on chat.",
    "structured-outputs": "What following a JSON schema costs in a step.",
    "cpu-kernels": "The native dense products beside torch's prepacked ones.",
    "adapters": "Decode steps with adapters, and what requests without one pay for them.",
    "fleet": "Engines behind the HTTP server, beside what the simulator foretells of them.",
    "hybrids": "A hybrid of random weights, in turn with llama.cpp's tools on the same file.",
    "big-models": "Models of billions of random weights, in turn with llama.cpp's tools.",
    "embeddings": "Sentences a second, in turn with sentence-transformers and onnxruntime.",
}.items():
    # imported when it runs: the scheduler's must not find torch
    function = name.replace("-", "_")
    path = f"scripts.benchmarks.{function}:{function}"
    app.command(path, name=name, help=text, help_epilogue="")


main = functools.partial(run_app, app, failed=(RuntimeError, OSError))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
