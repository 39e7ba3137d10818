"""Random shapes of every family at 2 to 4 ranks against one rank, with random weights. By hand:
`python -m tests.engine_core.distributed.campaign SECONDS [SEED]`."""

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from engine_core.distributed.collectives import Collectives
from engine_core.model_files.hf_folder import ConfigOnly
from engine_core.options.engine import EngineOptions
from engine_core.startup.model import load_any_model
from tests.engine_core.conftest import PagedRun, in_awkward_steps
from tests.engine_core.distributed.rank_models import WholeLogits
from tests.engine_core.distributed.rank_processes import RankProcesses

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Mixtral", "Qwen3Moe")
TOLERANCE = {"auto": 1e-4, "int8": 0.05}
"""Of logits with a deviation of 0.3. Rows of int8 have a scale for each rank's columns."""


def draw_config(draw: random.Random, size: int) -> dict[str, object]:
    """Of a model that so many ranks can share."""
    family = draw.choice(FAMILIES)
    kv_heads = draw.choice([n for n in (1, 2, 3, 4, 8) if not n % size or not size % n])
    heads = math.lcm(size, kv_heads) * draw.choice([1, 2])
    hidden = heads * 8 if family == "Qwen2" else draw.choice([32, 36, 48, 64])
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": draw.choice([size, size + 1, 31, 33, 63, 64, 65, 97, 129, 500]),
        "hidden_size": hidden,
        "intermediate_size": draw.choice([size, 37, 50, 64, 96, 256]),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": family == "Llama" and draw.random() < 0.5,
    }
    if family != "Qwen2":
        config["head_dim"] = draw.choice([4, 8, 16])
    if family in ("Mistral", "Gemma3"):
        config["sliding_window"] = draw.choice([3, 9])
    if family in ("Mixtral", "Qwen3Moe"):
        number = draw.choice([1, 2, 3, 4, 8])
        config["num_local_experts" if family == "Mixtral" else "num_experts"] = number
        config["num_experts_per_tok"] = draw.randint(1, number)
        config["moe_intermediate_size"] = draw.choice([size, 22, 64])
    return config


def logits_of(
    collectives: Collectives, file: Path, sequences: list[list[int]], quantization: str
) -> list[torch.Tensor]:
    """At one rank of a model with random weights."""
    options = EngineOptions(
        load_format="dummy",
        model_config=file,
        num_threads=1,
        quantization=quantization,
        weight_cache_size=0,
    )
    loaded = load_any_model(options, ConfigOnly(file), torch.device("cpu"), collectives)
    model = WholeLogits(loaded.model, collectives)
    return in_awkward_steps(PagedRun(model, loaded.ops, sequences, 16, torch.float32))


def main(limit_s: float, seed: int) -> None:
    draw = random.Random(seed)
    began_s, number = time.monotonic(), 0
    with RankProcesses(4) as ranks, tempfile.TemporaryDirectory() as folder:
        while time.monotonic() - began_s < limit_s:
            size, quantization = draw.choice([2, 3, 4]), draw.choice(list(TOLERANCE))
            config = draw_config(draw, size)
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            lengths = (9, 1, 4)
            sequences = [
                [draw.randrange(config["vocab_size"]) for _ in range(length)] for length in lengths
            ]
            arguments = (file, sequences, quantization)
            one, *_ = ranks.run(logits_of, *arguments)
            for found in ranks.run(logits_of, *arguments, tp_size=size):
                apart = max(float((a - b).abs().max()) for a, b in zip(found, one, strict=True))
                assert apart < TOLERANCE[quantization], f"{apart}: {size} ranks, {arguments}"
            number += 1
    print(f"{number} models")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
