"""In which numbers a model's weights are, as options and its architecture decide; CPU only."""

import json
from unittest.mock import Mock

import pytest
import torch

from engine_core.errors import ConfigurationError
from engine_core.model_files import ConfigOnly
from engine_core.options.checks import check_cpu_experts
from engine_core.options.engine import EngineOptions
from engine_core.startup import model
from engine_core.startup.device import Numbers, float_weights_of, keeps_blocks
from engine_core.startup.model import load_any_model
from kernels.backends import select_operations
from kernels.cpu import library
from kernels.cpu.library import NativeLibraryUnavailable
from kernels.triton.operations import TritonOperations
from tests.native_kernels import native_library_or_skip

DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
SPARSE = DENSE | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def native_kernels():
    native_library_or_skip()


@pytest.fixture
def load(tmp_path):
    """(config, options) -> the model with random weights."""

    def load(config=DENSE, *, dtype="float32", device="cpu", **options):
        file = tmp_path / "shape.json"
        file.write_text(json.dumps(config))
        options = EngineOptions(dtype=dtype, load_format="dummy", model_config=file, **options)
        return load_any_model(options, ConfigOnly(file), torch.device(device))

    return load


@pytest.fixture
def interpreted_gpu(monkeypatch):
    """A GPU's operations on this CPU."""

    def select(device, **options):
        if torch.device(device).type == "cpu":
            return select_operations(device, **options)
        return TritonOperations(torch.device("cpu"))

    monkeypatch.setattr(model, "select_operations", select)
    return "cuda"


def test_experts_of_the_first_layers_stay_on_the_host_in_16_bits(
    load, interpreted_gpu, caplog, monkeypatch
):
    caplog.set_level("INFO")
    whole = load(SPARSE, dtype="bfloat16", device=interpreted_gpu)
    loaded = load(SPARSE, dtype="bfloat16", device=interpreted_gpu, cpu_experts=1)
    assert (whole.captures_steps, loaded.captures_steps) == (True, False)
    assert loaded.weights == whole.weights == "bfloat16"
    host = loaded.ops.weight_packing(torch.bfloat16, experts="model.layers.0.block_sparse_moe")
    assert host.bytes_by_format() == {"bfloat16": pytest.approx(4 * 3 * 64 * 96 * 2, rel=0.1)}
    assert (
        "experts of the first 1 layers are in the host's memory: 0.0 GiB (bfloat16)" in caplog.text
    )
    unavailable = NativeLibraryUnavailable("there is no compiler")
    monkeypatch.setattr(library, "load_library", Mock(side_effect=unavailable))
    with pytest.raises(ConfigurationError, match="needs the native CPU kernels: there is no comp"):
        load(SPARSE, dtype="bfloat16", device=interpreted_gpu, cpu_experts=1)
    with pytest.raises(ConfigurationError, match="first 2 layers of LlamaForCausalLM have no exp"):
        check_cpu_experts(EngineOptions(cpu_experts=2), DENSE)


@pytest.mark.parametrize(
    ("floats", "weights"),
    [("none", "float32"), ("int8", "int8"), ("int4", "int4+int8")],
)
def test_dense_models_are_packed_in_the_format_asked_for(load, floats, weights):
    loaded = load(quantization=floats, batch_invariant=True)
    assert loaded.ops.name.startswith("native-cpu-")
    assert (loaded.weights, loaded.is_packed) == (weights, True)


@pytest.mark.parametrize(
    ("floats", "weights"), [("int8", "int8+float32"), ("int4", "int4+float32+int8")]
)
def test_experts_are_packed_as_dense_layers_and_their_router_stays(load, floats, weights):
    loaded = load(SPARSE, quantization=floats)
    assert (loaded.weights, loaded.is_packed) == (weights, True)


@pytest.mark.parametrize(("config", "weights"), [(DENSE, "bfloat16"), (SPARSE, "bfloat16+float32")])
def test_bfloat16_is_packed_with_activations_and_routers_in_float32(load, config, weights):
    loaded = load(config, dtype="bfloat16", batch_invariant=True)
    assert (loaded.weights, loaded.is_packed) == (weights, True)
    assert loaded.numbers == Numbers("bfloat16", torch.float32, "bfloat16")


def test_auto_is_bfloat16_for_a_checkpoint_of_16_bits_where_the_cpu_has_units(load):
    library = native_library_or_skip()
    loaded = load(DENSE | {"dtype": "bfloat16"}, dtype="auto")
    assert loaded.weights == ("bfloat16" if library.has_bfloat16 else "float32")
    with library.forced_isa("portable"):
        loaded = load(DENSE | {"dtype": "bfloat16"}, dtype="auto")
    assert (loaded.weights, loaded.numbers.reason) == (
        "float32",
        "this CPU has no units for bfloat16",
    )


def test_other_types_are_not_packed(load):
    loaded = load(dtype="float16")
    assert (loaded.weights, loaded.is_packed) == ("float16", False)


@pytest.mark.parametrize(("config", "options"), [(DENSE, {"dtype": "float16"})])
def test_batch_invariance_is_refused_where_torch_has_a_part_in_products(load, config, options):
    with pytest.raises(ConfigurationError, match=r"--batch-invariant on a CPU: .* torch computes"):
        load(config, batch_invariant=True, **options)


def test_quantisation_is_refused_for_transformers_model_code(tmp_path):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(DENSE))
    options = EngineOptions(
        model="m", dtype="float32", model_impl="transformers", quantization="int8"
    )
    with pytest.raises(ConfigurationError, match=r"int8 has no effect on transformers.*leave it"):
        load_any_model(options, ConfigOnly(file), torch.device("cpu"))


def test_blocks_are_kept_unless_another_form_is_asked_for():
    assert keeps_blocks("auto", "auto")
    assert not keeps_blocks("auto", "float32")
    assert not any(keeps_blocks(name, "auto") for name in ("none", "int8", "int4"))
    formats = [float_weights_of(name) for name in ("auto", "none", "int8", "int4")]
    assert formats == ["float32", "float32", "int8", "int4"]


@pytest.mark.parametrize(("dtype", "num_lines"), [("float16", 1), ("float32", 1), ("auto", 0)])
def test_quantised_weights_that_a_dtype_gives_up_are_said_in_one_line(
    tmp_path, caplog, dtype, num_lines
):
    (tmp_path / "shape.json").write_text(json.dumps(DENSE))
    files = ConfigOnly(tmp_path / "shape.json")
    files.quantised_types = frozenset({"Q4_1"})
    files.path = tmp_path / "shape.json"  # a file, as a GGUF is
    options = EngineOptions(dtype=dtype, load_format="dummy", model_config=files.path)
    load_any_model(options, files, torch.device("cpu"))
    lines = [record.getMessage() for record in caplog.records if "--dtype" in record.getMessage()]
    assert len(lines) == num_lines
    assert all(f"--dtype {dtype}: the file's quantised weights (Q4_1)" in line for line in lines)
