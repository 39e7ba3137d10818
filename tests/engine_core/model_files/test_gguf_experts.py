"""Tiny models with experts, written as llama.cpp's converter would, come back as they were."""

import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AfmoeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from engine_core.model_files import UnsupportedModelFile, open_model_files
from engine_core.models.errors import ModelWeightsError
from engine_core.models.loading import load_model
from kernels.cpu.operations import CpuOperations
from kernels.triton.operations import TritonOperations
from tests.engine_core.distributed.rank_models import paged_logits as rank_logits
from tests.engine_core.distributed.rank_processes import RankProcesses
from tests.engine_core.model_files.converted import gguf_keys, gguf_tensors
from tests.engine_core.rounded_activations import inputs_in_bytes
from tests.native_kernels import native_library_or_skip

SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
CONFIGS = {
    "llama": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "qwen3moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "qwen2moe": Qwen2MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=32,
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=3),
}
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_DEEPSEEK = SHAPE | _FEW | {"n_routed_experts": 6, "n_shared_experts": 2, "pad_token_id": 0}
_PART = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
_FACTORS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "logits_scaling": 2.0}
OTHERS = {
    "glm4moe": Glm4MoeConfig(
        **_DEEPSEEK | {"rope_parameters": _PART},
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4moe, Solar Open": SolarOpenConfig(**_DEEPSEEK),
    "dots1": Dots1Config(
        **_DEEPSEEK, norm_topk_prob=False, first_k_dense_replace=1, sliding_window=None
    ),
    "minimax-m2": MiniMaxM2Config(
        **SHAPE | {"rope_parameters": _PART}, num_local_experts=6, num_experts_per_tok=2
    ),
    "granitemoe": GraniteMoeSharedConfig(
        **{key: value for key, value in SHAPE.items() if key != "head_dim"},
        **_FACTORS,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
    ),
    "hunyuan-moe": HunYuanMoEV1Config(**SHAPE, num_experts=6, moe_topk=2, pad_token_id=0),
    "ernie4_5-moe": Ernie4_5_MoeConfig(
        **SHAPE | {"num_hidden_layers": 3},
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=32,
        pad_token_id=0,
    ),
    "afmoe": AfmoeConfig(
        **SHAPE | _FEW,
        num_experts=6,
        num_shared_experts=2,
        num_dense_layers=1,
        route_scale=2.5,
        sliding_window=7,
        mup_enabled=True,
    ),
}
"""By the names of llama.cpp, as those above."""


SIDES = ("gate_up_proj", "down_proj")
LENGTHS = (25, 1, 19)
"""Of sequences."""


def keys_of(arch: str) -> dict[str, Any]:
    return gguf_keys(CONFIGS[arch])


def random_model(arch: str) -> Any:
    torch.manual_seed(0)
    config = (CONFIGS | OTHERS)[arch]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    biases = [each for name, each in model.named_buffers() if name.endswith("_bias")]
    for tensor in (*model.parameters(), *biases):
        torch.nn.init.normal_(tensor, std=0.2)
    return model


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(99, (length,), generator=generator).tolist() for length in LENGTHS]


def assert_logits_are_those_of(model, files, ops, paged_logits) -> None:
    packing = ops.weight_packing(torch.float32)
    tensors = files.tensors(keeps_blocks=packing is not None)
    ours = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
    for tokens, logits in zip(sequences(), paged_logits(ours, sequences(), on=ops), strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens])).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("arch", CONFIGS)
def test_config_and_logits_of_the_file_are_those_of_transformers(
    arch, write_gguf, ops, paged_logits
) -> None:
    model = random_model(arch)
    path = write_gguf(keys_of(arch), gguf_tensors(CONFIGS[arch], model.state_dict()))
    files = open_model_files(str(path), report=print)
    again = AutoConfig.for_model(**files.config)
    assert type(again) is type(CONFIGS[arch])
    for field in (
        *SHAPE,
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "sliding_window",
    ):
        assert getattr(again, field, None) == getattr(CONFIGS[arch], field, None), field
    assert_logits_are_those_of(model, files, ops, paged_logits)


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_logits_of_other_mixtures_are_those_of_transformers(
    arch, write_gguf, ops, paged_logits
) -> None:
    model, config = random_model(arch), OTHERS[arch]
    path = write_gguf(gguf_keys(config), gguf_tensors(config, model.state_dict()))
    assert_logits_are_those_of(model, open_model_files(str(path), report=print), ops, paged_logits)


def quantised_stacks(write_gguf, arch="qwen3moe", gate_up="Q8_0", down="Q8_0"):
    """(a model, the files of it with its experts in blocks)."""
    model = random_model(arch)
    tensors = gguf_tensors(CONFIGS[arch], model.state_dict())
    kinds = {"down": gguf.GGMLQuantizationType[down], "gate": gguf.GGMLQuantizationType[gate_up]}
    for name, values in tensors.items():
        if "_exps" in name:
            kind = kinds["down" if "down" in name else "gate"]
            tensors[name] = (gguf.quants.quantize(values, kind), kind)
    for name, stack in experts_of(model):  # the model to compare with has the rounded weights
        kind = kinds["down" if "down" in name else "gate"]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(stack.numpy(), kind), kind)
        stack.copy_(torch.from_numpy(rounded))
    path = write_gguf(keys_of(arch), tensors)
    return model, open_model_files(str(path), report=print)


def experts_of(model):
    return [(name, stack) for name, stack in model.state_dict().items() if "experts" in name]


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_torch_dequantises_stacks_expert_by_expert(write_gguf, ops, paged_logits) -> None:
    assert_logits_are_those_of(*quantised_stacks(write_gguf), ops, paged_logits)


def logits_of(model):
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.tensor([each])).logits[0] for each in sequences()])


def assert_differs_by_rounded_activations_only(model, ours) -> None:
    exact = logits_of(model)
    with inputs_in_bytes(stack for name, stack in experts_of(model) if name.endswith(SIDES)):
        rounded = logits_of(model)
    by_rounding = (rounded - exact).norm()
    assert 1e-4 * exact.norm() < by_rounding < 0.05 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert (ours - rounded).norm() < 0.2 * by_rounding


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize(
    ("gate_up", "down"), [("Q8_0", "Q4_0"), ("Q4_1", "Q5_0"), ("Q4_0", "Q5_1"), ("Q5_1", "Q8_0")]
)
def test_stacks_stay_blocks_on_a_cpu(arch, gate_up, down, write_gguf, ops, paged_logits) -> None:
    """Each side in a type of its own; Q5_0 runs as Q8_0."""
    model, files = quantised_stacks(write_gguf, arch, gate_up, down)
    ops = CpuOperations(native_library_or_skip())
    packing = ops.weight_packing(torch.float32)
    tensors = files.tensors(keeps_blocks=True)
    ours = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
    wanted = {{"Q5_0": "Q8_0"}.get(name, name) for name in (gate_up, down)} | {"float32"}
    assert set(packing.bytes_by_format()) == wanted
    logits = torch.cat(paged_logits(ours, sequences(), on=ops))
    assert_differs_by_rounded_activations_only(model, logits)


# one of three experts, by width, and one of four, by expert
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_two_ranks_share_stacks_of_blocks(arch, write_gguf) -> None:
    model, files = quantised_stacks(write_gguf, arch)
    with RankProcesses(2) as ranks:
        answers = ranks.run(rank_logits, files.path, sequences(), "native", tp_size=2)
    assert_differs_by_rounded_activations_only(model, torch.cat(answers[0]))


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_stacks_stay_blocks_on_a_gpu(write_gguf, paged_logits, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (3, 1))
    model, files = quantised_stacks(write_gguf)
    ops = TritonOperations(torch.device("cpu"), quantised_types=files.quantised_types)
    assert_logits_are_those_of(model, files, ops, paged_logits)
    packing = ops.weight_packing(torch.float32)
    num_numbers = 2 * 4 * 3 * 64 * 64
    assert packing.bytes_by_format()["Q8_0"] == num_numbers * (1 + 2 / 32)


def test_old_files_with_a_tensor_an_expert_are_read(write_gguf, ops, paged_logits) -> None:
    model = random_model("llama")
    tensors = gguf_tensors(CONFIGS["llama"], model.state_dict())
    for name in [name for name in tensors if "_exps" in name]:
        for expert, values in enumerate(tensors.pop(name)):
            tensors[name.replace("_exps.", f".{expert}.")] = values
    path = write_gguf(keys_of("llama"), tensors)
    files = open_model_files(str(path), report=print)
    assert_logits_are_those_of(model, files, ops, paged_logits)


def test_a_stack_that_lacks_an_expert_is_named(write_gguf, ops) -> None:
    tensors = gguf_tensors(CONFIGS["llama"], random_model("llama").state_dict())
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:2]
    files = open_model_files(str(write_gguf(keys_of("llama"), tensors)), report=print)
    with pytest.raises(ModelWeightsError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3"):
        load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("llama", "expert_weights_norm", False, "not renormalised"),
        ("llama", "expert_gating_func", 2, "expert_gating_func 2"),
        ("qwen3moe", "expert_weights_scale", 2.5, "expert_weights_scale 2.5"),
        ("qwen3moe", "expert_shared_count", 1, "expert_shared_count 1"),
    ],
)
def test_experts_that_would_be_computed_otherwise_are_refused(
    arch, key, value, message, write_gguf
) -> None:
    keys = keys_of(arch) | {f"{arch}.{key}": value}
    path = write_gguf(keys, {"token_embd.weight": np.ones((99, 64), np.float32)})
    with pytest.raises(UnsupportedModelFile, match=message):
        open_model_files(str(path), report=print)


def test_experts_of_an_architecture_without_them_are_refused(write_gguf) -> None:
    keys = {key.replace("qwen3moe", "qwen3"): value for key, value in keys_of("qwen3moe").items()}
    keys["general.architecture"] = "qwen3"
    path = write_gguf(keys, {"token_embd.weight": np.ones((99, 64), np.float32)})
    with pytest.raises(UnsupportedModelFile, match="mixture of experts"):
        open_model_files(str(path), report=print)
