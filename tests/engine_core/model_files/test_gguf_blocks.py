"""Blocks of a GGUF file as they are: the same numbers as dequantised, run by the native kernels."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from engine_core.model_commands import pull
from engine_core.model_files import open_model_files
from engine_core.models.errors import ModelWeightsError
from engine_core.models.loading import load_model
from engine_core.options.engine import EngineOptions
from engine_core.startup.before_torch import open_model
from engine_core.startup.model import load_any_model
from kernels.cpu.operations import CpuOperations
from kernels.interface.weights import QuantisedTensor
from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations
from tests.native_kernels import native_library_or_skip

HIDDEN, HEADS, KV_HEADS, FEED, VOCAB, LAYERS = 64, 4, 2, 96, 70, 2
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": VOCAB,
}
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * 16, HIDDEN),
    "attn_v": (KV_HEADS * 16, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FEED, HIDDEN),
    "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}
# types that run, a type that becomes another, one that is dequantised, and plain numbers
TYPES = {"attn_q": "Q4_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q5_1"}


def tensors(default: str | None = "Q4_1", *, tied: bool = True) -> dict[str, Any]:
    """A random model in blocks; `default` for matrices that TYPES does not name, None: floats."""
    generator = np.random.default_rng(3)

    def matrix(shape: tuple[int, int], type_name: str | None) -> Any:
        values = (generator.standard_normal(shape) * 0.2).astype(np.float32)
        if type_name is None:
            return values
        kind = GGMLQuantizationType[type_name]
        return quantize(values, kind), kind

    made: dict[str, Any] = {
        "token_embd.weight": matrix((VOCAB, HIDDEN), default and "Q8_0"),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    if not tied:
        made["output.weight"] = matrix((VOCAB, HIDDEN), default)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, shape in SHAPES.items():
            type_name = default and TYPES.get(name, default)
            made[f"blk.{layer}.{name}.weight"] = matrix(shape, type_name)
    return made


@pytest.fixture
def native() -> CpuOperations:
    return CpuOperations(native_library_or_skip())


def test_blocks_stand_for_the_numbers_that_dequantising_gives(write_gguf) -> None:
    """Rows of q and k, which the converter has permuted, among them."""
    files = open_model_files(str(write_gguf(KEYS, tensors(tied=False))), report=print)
    plain = dict(files.tensors())
    kept = dict(files.tensors(keeps_blocks=True))
    assert plain.keys() == kept.keys()
    types = {}
    for name, expected in plain.items():
        tensor = kept[name]
        assert tuple(tensor.shape) == tuple(expected.shape)
        if isinstance(tensor, QuantisedTensor):
            types[name] = tensor.type_name
            tensor = tensor.dequantise()
        assert torch.equal(tensor, expected), name
    assert types["model.layers.1.self_attn.q_proj.weight"] == "Q4_0"
    assert types["model.layers.1.mlp.down_proj.weight"] == "Q4_1"
    assert types["model.layers.1.self_attn.o_proj.weight"] == "Q5_1"
    assert not any(isinstance(tensor, QuantisedTensor) for tensor in plain.values())
    assert not any("norm" in name for name in types)


class QuantisedActivations(TorchOperations):
    """Torch's, with the inputs of products in signed bytes: a scale for 32 of them."""

    def linear(self, x_TE, weight):
        groups = x_TE.reshape(len(x_TE), -1, 32)
        scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
        return super().linear((torch.round(groups / scales) * scales).reshape(x_TE.shape), weight)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_blocks_differ_by_the_quantised_activations_only(
    write_gguf, native, paged_logits, tied
) -> None:
    made = tensors(tied=tied)
    # of a type that runs as blocks, so that both sides quantise the same activations
    diagonal = quantize(np.eye(HIDDEN, dtype=np.float32) * 0.3, GGMLQuantizationType.Q8_0)
    for layer in range(LAYERS):
        made[f"blk.{layer}.attn_output.weight"] = (diagonal, GGMLQuantizationType.Q8_0)
    files = open_model_files(str(write_gguf(KEYS, made)), report=print)
    packing = native.weight_packing(torch.float32)
    assert packing is not None
    torch.manual_seed(0)
    sequences = [torch.randint(VOCAB, (length,)).tolist() for length in (40, 1, 17)]

    def logits(ops, keeps_blocks=False):
        tensors_of_file = files.tensors(keeps_blocks=keeps_blocks)
        model = load_model(files.config, tensors_of_file, dtype=torch.float32, ops=ops)
        return torch.cat(paged_logits(model, sequences, on=ops))

    ours = logits(native, keeps_blocks=True)
    assert set(packing.bytes_by_format()) == {"Q4_0", "Q4_1", "Q8_0"}
    exact, rounded = logits(TorchOperations()), logits(QuantisedActivations())
    by_quantising = (rounded - exact).norm()
    assert 0.001 * exact.norm() < by_quantising < 0.05 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert (ours - rounded).norm() < 0.2 * by_quantising


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_blocks_on_a_gpu_are_those_of_the_dequantised_model(
    write_gguf, paged_logits, ops, tied
) -> None:
    """Interpreted. Three types in one layer."""
    files = open_model_files(str(write_gguf(KEYS, tensors(tied=tied))), report=print)
    assert files.quantised_types == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    on_gpu = TritonOperations(torch.device("cpu"), quantised_types=files.quantised_types)
    packing = on_gpu.weight_packing(torch.float32)
    assert packing is not None
    torch.manual_seed(0)
    sequences = [torch.randint(VOCAB, (length,)).tolist() for length in (13, 1)]
    results = []
    for each, keeps_blocks in ((on_gpu, True), (ops, False)):
        parts = files.tensors(keeps_blocks=keeps_blocks)
        model = load_model(files.config, parts, dtype=torch.float32, ops=each)
        results.append(torch.cat(paged_logits(model, sequences, on=each)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert set(packing.bytes_by_format()) == files.quantised_types


def test_weights_that_cannot_be_quantised_are_refused_by_name(write_gguf, native) -> None:
    made = tensors(None)
    made["blk.1.ffn_up.weight"][3, 5] = np.nan
    files = open_model_files(str(write_gguf(KEYS, made)), report=print)
    ops = CpuOperations(native_library_or_skip(), linear_weights="int8")
    with pytest.raises(ModelWeightsError, match=r"layers\.1\.mlp.*values that are not finite"):
        load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)


def test_pull_packs_what_a_start_maps(write_gguf, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "cache" / "weights"
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(folder.parent))

    def kept() -> tuple[str, int]:
        for thread in threading.enumerate():
            if thread.name == "weight-cache":
                thread.join()
        (file,) = folder.iterdir()
        return file.name, file.stat().st_ino

    path = str(write_gguf(KEYS, tensors()))
    pull(path, json=True)
    *statuses, done = map(json.loads, capsys.readouterr().out.splitlines())
    assert done["status"] == "success"
    assert statuses[-1]["completed"] == statuses[-1]["total"] == Path(path).stat().st_size
    packed, options = kept(), EngineOptions(model=path)
    loaded = load_any_model(options, open_model(options).files, torch.device("cpu"))
    assert loaded.mapped_bytes > 0
    assert kept() == packed
    pull(path, json=True)
    assert len(capsys.readouterr().out.splitlines()) == 1  # nothing is left to do
