"""Models of billions of random weights: speed in turn with llama.cpp's tools on the same file, how
long a start takes, and memory beside the file's size."""

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from scripts.benchmarks import Json, Repeat, Rows, report, running_daemon
from scripts.benchmarks.big_model_files import SHAPES, write_model
from scripts.benchmarks.hybrids import in_turn, medians_of

Name = Literal["llama-1b", "llama-3b", "llama-8b", "qwen3-4b", "qwen3-moe", "tiny"]


def big_models(
    *,
    shapes: Annotated[
        tuple[Name, ...], Parameter(consume_multiple=True, negative="", help="In Q4_K_M.")
    ] = ("llama-1b",),
    llama: Annotated[Path | None, Parameter(help="Folder of llama.cpp's built tools.")] = None,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    prompts: Rows = (512,),
    streams: Rows = (1, 16),
    threads: int = 2,
    repeat: Repeat = 3,
    json: Json = None,
) -> None:
    """Tokens a second, medians of both engines in turn; seconds from launch to ready of the first
    start, which packs the weights, and of the second; and our peak memory above the file's size,
    after a first short answer and after all, whose keys and values stay cached."""
    models: dict[str, Any] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{shape}.gguf"
            write_model(file, SHAPES[shape])
            words = options.split()
            starts = {}
            for name in ("first start, s", "second start, s"):
                command = ["--model", str(file), "--num-threads", str(threads), *words]
                with running_daemon(command) as (daemon, _):
                    starts[name] = round(daemon.since_launch_s, 2)
            rounds, peaks = in_turn(
                file, SHAPES[shape].vocabulary, words, llama, prompts, streams, threads, repeat
            )
            size = file.stat().st_size
        medians = medians_of(rounds)
        above = [round((peak - size) / 1e6) for peak in peaks]
        names = ("first answer, MB above the file", "all, MB above the file")
        medians["engine-core"] |= starts | dict(zip(names, above, strict=True))
        models[shape] = {"file_bytes": size, "medians": medians, "rounds": rounds}
    table = "\n".join(
        f"{shape:12}{engine:14}" + "  ".join(f"{key}: {value:.4g}" for key, value in each.items())
        for shape, found in models.items()
        for engine, each in found["medians"].items()
    )
    report({"threads": threads, "options": options, "models": models}, json, table)
