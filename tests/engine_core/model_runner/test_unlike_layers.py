"""A made-up model whose layers have two head sizes, and two of which read other layers' keys: the
engine's tokens are those of a plain computation, in chunks, with prefix hits, swapped or not."""

import pytest
import torch
from engine_loop import EngineLoop, make_scheduler
from host_sampled import HostSampledTriton
from runners import runner_config, spoiled

from engine_core.layers.parameters import place
from engine_core.layers.rotary import RotaryConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.blocks.block import BlockBuilder
from engine_core.models.config import ModelConfig
from engine_core.models.decoder import Decoder
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys
from engine_core.models.weight_transfer import WeightTransfer
from kernels.backends import select_operations
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

H, E, F, V, EPS, THETA = 4, 24, 40, 61, 1e-5, 100.0
LAYERS = (
    PagedKeys(1, 16, 16),
    PagedKeys(4, 8, 8, window=6),
    PagedKeys(1, 16, 16, shares=0),
    PagedKeys(1, 16, 16),
    PagedKeys(4, 8, 8, window=6, shares=1),
)
BACKENDS = {
    "native": lambda: select_operations(torch.device("cpu")),
    "torch": TorchOperations,
    "triton": lambda: HostSampledTriton(torch.device("cpu")),
}


def model_of(ops):
    """The model, and its weights by name."""
    config = ModelConfig(
        spec=ModelSpec(
            layers=LAYERS, num_query_heads=H, hidden_size=E, vocab_size=V, max_model_len=64
        ),
        intermediate_size=F,
        norm_eps=EPS,
        activation="silu",
        experts=(None,) * len(LAYERS),
        rotary=tuple(RotaryConfig(tuple(frequencies(keys.key_size).tolist())) for keys in LAYERS),
        tied_head=True,
        block=lambda build, layer: build.block(layer, build.attention(layer, head_norms=True)),
    )
    build = BlockBuilder(config, dtype=torch.float32, ops=ops, num_positions=64)
    model = Decoder(build, lambda name, tensor: [(name, tensor)])
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, placement in sorted(model.placements().items()):
        if name not in model.optional_names:
            weight = torch.randn(placement.shape, generator=generator) * 0.3
            weights[name] = weight + 1 if weight.dim() == 1 else weight
            place(placement, weights[name].clone(), WeightTransfer().copy)
    model.finish_loading()
    return model, weights


def frequencies(size):
    return THETA ** (-torch.arange(0, size, 2) / size)


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x_THD):
    size = x_THD.shape[2]
    angles = torch.arange(len(x_THD))[:, None, None] * frequencies(size)
    left, right = x_THD.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def greedy(weights, prompt, number):
    """Tokens by a computation of all positions at once, each anew."""
    tokens = list(prompt)
    for _ in range(number):
        hidden, kept = weights["model.embed_tokens.weight"][tokens], {}
        behind = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
        for index, keys in enumerate(LAYERS):
            own = {
                name.removeprefix(f"model.layers.{index}."): weight
                for name, weight in weights.items()
            }
            x = norm(hidden, own["input_layernorm.weight"])
            q, *kv = (
                (x @ own[f"self_attn.{part}_proj.weight"].T).unflatten(1, (-1, keys.key_size))
                for part in ("q" if keys.shares is not None else "qkv")
            )
            q = rotate(norm(q, own["self_attn.q_norm.weight"]))
            if kv:
                kept[index] = rotate(norm(kv[0], own["self_attn.k_norm.weight"])), kv[1]
            k, v = (
                part.repeat_interleave(H // keys.num_kv_heads, 1)
                for part in kept[index if keys.shares is None else keys.shares]
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * keys.key_size**-0.5
            scores[:, (behind < 0) | (behind >= (keys.window or 99))] = -torch.inf
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            hidden = hidden + out @ own["self_attn.o_proj.weight"].T
            x = norm(hidden, own["post_attention_layernorm.weight"])
            gate, up = (x @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            down = own["mlp.down_proj.weight"]
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ down.T
        x = norm(hidden[-1], weights["model.norm.weight"])
        tokens.append(int((weights["model.embed_tokens.weight"] @ x).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("backend", "swap"),
    [
        ("native", False),
        ("native", True),
        ("torch", True),
        pytest.param("triton", True, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_a_plain_computation(backend, swap):
    model, weights = model_of(ops := BACKENDS[backend]())
    number = 6 if backend == "triton" else 18
    blocks = {"num_blocks": 26, "num_host_blocks": 40}
    config = runner_config(model, ops, max_num_batched_tokens=16, max_num_seqs=4, **blocks)
    assert [group.layers for group in config.layout.groups] == [(0, 3), (1,)]
    assert config.layout.block_bytes == 4 * 2 * 32 * 4, "none is wasted"
    runner = spoiled(CPUModelRunner(config))
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}
    loop = EngineLoop(make_scheduler(config.layout, swap=swap, **blocks, **limits), runner, depth=1)
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(8, V, (23,), generator=generator).tolist()
    prompts = {"a": first, "b": [*first[:21], 9, 10], "c": first[:9], "d": first[3:12]}
    for name, prompt in prompts.items():
        loop.add(name, prompt, SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True))
        loop.step()
        loop.step()
    loop.finish()
    assert max(loop.num_cached_tokens.values()) >= 8
    for name, prompt in prompts.items():
        assert loop.tokens[name, 0] == greedy(weights, prompt, number), name
