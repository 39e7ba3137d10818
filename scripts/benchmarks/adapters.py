"""Decode steps of a batch with adapters, and without one where adapters are served."""

import contextlib
import json as json_format
import tempfile
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from safetensors.torch import save_file

from engine_core.model_files import ModelFiles, open_model_files
from frontend import LLM, LoRARequest, SamplingParams, TokensPrompt
from frontend.load.report import log
from scripts.benchmarks import DEFAULT_MODEL, Json, Model, Repeat, report, running_daemon

_ROWS, _PROMPT, _OUTPUT = 16, 32, 64


def adapters(
    model: Model = DEFAULT_MODEL,
    *,
    rank: Annotated[int, Parameter(help="Of each adapter, on all linear layers.")] = 16,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """Output tokens a second of the engine's steps, of 16 requests at once with 0, 1, 4 and 16
    adapters among them; all cases in turn, the best of each counts."""
    common = ["--model", model, "--no-enable-prefix-caching", *options.split()]
    names = [f"adapter-{number}" for number in range(_ROWS)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = open_model_files(model, report=log)
        for name in names:
            write_adapter(folder / name, files, rank)
        given = [word for name in names for word in ("--adapter", f"{name}={folder / name}")]
        plain, served = (
            LLM(address=stack.enter_context(running_daemon([*common, *more]))[1]["address"])
            for more in ([], [*given, "--max-loras", str(_ROWS)])
        )
        cases = {
            "adapters not served": (plain, 0),
            "served, none asked for": (served, 0),
            **{f"{number} in the batch": (served, number) for number in (1, 4, 16)},
        }
        best = dict.fromkeys(cases, 0.0)
        for _ in range(repeat):
            for name, (llm, number) in cases.items():
                asked = [
                    LoRARequest(names[row % number]) if number else None for row in range(_ROWS)
                ]
                best[name] = max(best[name], _rate(llm, asked))
        plain.close()
        served.close()
    base = best["adapters not served"]
    for name, rate in best.items():
        log(f"{name:24} {rate:8.1f} tokens/s {100 * rate / base:6.1f} %")
    report({"rank": rank, "options": options, "tokens_per_s": best}, json)


def _rate(llm: LLM, asked: list[LoRARequest | None]) -> float:
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [7 * row + place for place in range(_PROMPT)]} for row in range(_ROWS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True, detokenize=False)
    before_s = llm.statistics().step_time_s
    llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
    return _ROWS * _OUTPUT / (llm.statistics().step_time_s - before_s)


def write_adapter(folder: Path, files: ModelFiles, rank: int) -> None:
    """A folder of PEFT's with small random numbers on all linear layers."""
    config = files.config
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    sizes = {
        "self_attn": {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv),
                      "o_proj": (q, hidden)},
        "mlp": {"gate_proj": (hidden, width), "up_proj": (hidden, width),
                "down_proj": (width, hidden)},
    }  # fmt: skip
    tensors, modules = {}, []
    for part, linears in sizes.items():
        for linear, (inputs, outputs) in linears.items():
            modules.append(linear)
            for layer in range(config["num_hidden_layers"]):
                name = f"base_model.model.model.layers.{layer}.{part}.{linear}"
                tensors[f"{name}.lora_A.weight"] = 0.01 * torch.randn(rank, inputs)
                tensors[f"{name}.lora_B.weight"] = 0.01 * torch.randn(outputs, rank)
    folder.mkdir()
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json_format.dumps(described))
    save_file(tensors, folder / "adapter_model.safetensors")
