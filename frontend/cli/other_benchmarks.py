"""What users of `vllm bench serve`, SGLang's and llama.cpp's benchmarks type behind `bench`."""

from collections.abc import Iterator, Sequence

from frontend.cli.options import UsageError

_SAME_AS = {
    "--random-input-len": "--input-len", "--random-input": "--input-len",
    "--concurrency": "--max-concurrency",
    **dict.fromkeys(
        ("--random-output-len", "--random-output", "--sharegpt-output-len", "--custom-output-len"),
        "--output-len"),
}  # fmt: skip
_INSTEAD = {
    "throughput": "a running engine is measured: `bench` alone sends all requests at once",
    "latency": "a running engine is measured: use --max-concurrency 1",
    **dict.fromkeys(("--host", "--port"), "use --base-url http://HOST:PORT"),
    **dict.fromkeys(("--save-result", "--save-detailed", "--result-dir", "--result-filename", "-o",
                     "--output-file"), "use --out NAME"),
    **dict.fromkeys(("--tokenizer", "--percentile-metrics", "--disable-tqdm", "--trust-remote-code",
                     "--ready-check-timeout-sec"), "nothing needs it; omit it"),
    **dict.fromkeys(("--top-p", "--top-k", "--min-p"), "use --extra-body '{\"top_p\": 0.9}'"),
    **dict.fromkeys(("-m", "-ngl", "--n-gpu-layers", "-t", "--threads"), "a running engine is "
                    "measured; give it to `engine-core serve`"),
    "--random-range-ratio": "use --input-len uniform:A:B",
    "--random-prefix-len": "use --prefixes 1 --prefix-len N",
    "--plot-timeline": "use --html FILE",
    "--served-model-name": "use --model",
    "-p": "use --input-len", "--n-prompt": "use --input-len",
    "-n": "use --output-len", "--n-gen": "use --output-len",
    "-r": "use --num-prompts",
}  # fmt: skip


def as_typed(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments of `bench` in our words. Raises UsageError: one has another way here."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in _INSTEAD and (place == 0 or name.startswith("-")):
            raise UsageError(f"bench has no {name}: {_INSTEAD[name]}")
        if arguments[place - 1] == "--backend" and argument in ("vllm", "sglang", "sglang-oai"):
            yield "openai"
        elif place or argument != "serve":  # as in `vllm bench serve`
            yield f"{_SAME_AS.get(name, name)}{equals}{value}"
