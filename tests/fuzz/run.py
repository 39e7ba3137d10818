"""Fuzzes every target for a time, with atheris: `python -m tests.fuzz.run --time 60`. Keeps its
corpus and what failed under .fuzz/; the last line of the output is one JSON document."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

CORPUS = Path(".fuzz")
TIMEOUT_S = 5
MEMORY_MIB = 3000
MODULES = {
    "codec": ["protocol"],
    "engine": ["protocol", "engine_core"],
    "gguf": ["engine_core"],
    "safetensors": ["engine_core"],
    "tokenizer": ["engine_core", "frontend"],
    "chat_template": ["frontend", "jinja2"],
}
"""Whose coverage guides each target."""


def fuzz_one(name: str, seconds: int) -> None:
    """This process becomes the fuzzer of one target."""
    import atheris

    from tests.fuzz.mutation import mutate

    with atheris.instrument_imports(include=MODULES[name]):
        from tests.fuzz.targets import TARGETS

        target = TARGETS[name]()

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        def by_atheris(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(len(part) + 64, 64)))

        rng = random.Random(seed)
        return mutate(data, rng, words=target.words, mutate_bytes=by_atheris)[:max_size]

    corpus, failed = CORPUS / name, CORPUS / "failed"
    corpus.mkdir(parents=True, exist_ok=True)
    failed.mkdir(exist_ok=True)
    for index, data in enumerate(target.inputs()):
        (corpus / f"seed-{index}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-max_len=200000",
        "-print_final_stats=1",
        f"-artifact_prefix={failed}/{name}-",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], target, custom_mutator=custom_mutator)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> dict[str, object]:
    """Runs a process for one target; what it tried and reached."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.run", "--target", name, "--time", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace")
    (CORPUS / f"{name}.log").write_text(text)
    units = re.search(r"number_of_executed_units: (\d+)", text)
    progress = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
    counts = re.findall(r"^#(\d+)", text, re.MULTILINE)
    edges, features, kept = map(int, progress[-1]) if progress else (0, 0, 0)
    return {
        "target": name,
        "inputs": int(units[1] if units else counts[-1] if counts else 0),
        "seconds": round(time.monotonic() - started_s, 1),
        "covered_edges": edges,
        "features": features,
        "corpus": kept,
        "failed": done.returncode != 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", type=int, default=60, help="seconds for each target")
    parser.add_argument("--target", choices=MODULES, help="only this one, in this process")
    parser.add_argument("--only", nargs="*", choices=MODULES, default=list(MODULES))
    arguments = parser.parse_args()
    if arguments.target is not None:
        fuzz_one(arguments.target, arguments.time)
    CORPUS.mkdir(exist_ok=True)
    results = []
    for name in arguments.only:
        results.append(fuzz(name, arguments.time))
        print(
            "{target}: {inputs:,} inputs in {seconds} s, {covered_edges:,} edges, "
            "{corpus:,} inputs kept".format(**results[-1]),
            flush=True,
        )
        if results[-1]["failed"]:
            print(f"  FAILED: see {CORPUS}/{name}.log and {CORPUS}/failed/", flush=True)
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    document = {"date": date.today().isoformat(), **machine, "targets": results}
    (CORPUS / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return int(any(result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
