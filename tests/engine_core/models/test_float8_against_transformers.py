"""Float8 folders from the file to the logits, against transformers with the same numbers and the
same roundings (tests/engine_core/float8_folders.py).

On a GPU's operations (interpreted) activations are rounded as the files say; on a CPU's the weights
become bytes with a scale for 32 of them, and so do activations.
"""

import json
import logging
import threading

import pytest
import torch
import transformers
from float8_folders import RECIPES, float8_products, write_float8
from quantised_folders import save
from safetensors.torch import load_file

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile, open_model_files
from engine_core.models.loading import load_model
from engine_core.options.engine import EngineOptions
from engine_core.startup.model import load_any_model
from kernels.cpu import packing
from kernels.triton import operations
from kernels.triton.fp8_rounding import quantise_rows
from kernels.triton.linear import fp8 as fp8_linear
from kernels.triton.operations import TritonOperations
from tests.engine_core.conftest import PagedRun
from tests.engine_core.kept_blocks import as_a_cpu_keeps_it

CPU = torch.device("cpu")
V = 70
SHAPE = {
    "vocab_size": V,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
LLAMA = transformers.LlamaConfig(**SHAPE)
QWEN2 = transformers.Qwen2Config(**SHAPE)  # biases on q, k and v
EXPERTS = transformers.Qwen3MoeConfig(
    **SHAPE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True
)

LATENTS = transformers.DeepseekV3Config(
    **{**SHAPE, "num_key_value_heads": 4, "head_dim": 32},
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=48,  # blocks of 128 rows begin in the midst of heads
    qk_rope_head_dim=32,
    v_head_dim=48,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    first_k_dense_replace=0,
    n_group=1,
    topk_group=1,
)


def reference_of(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def load(folder, ops):
    files = open_model_files(str(folder), report=print)
    packing = ops.weight_packing(torch.float32)
    tensors = files.tensors(keeps_blocks=packing is not None)
    return load_model(files.config, tensors, dtype=torch.float32, ops=ops)


def triton_for(folder, **options):
    types = open_model_files(str(folder), report=print).quantised_types
    return TritonOperations(CPU, quantised_types=types, **options)


def logits_of(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def assert_as_transformers(model, reference, rounded, recipe, ops):
    """Rounding flips where two sums differ by the last bit of float32: so the distance to the
    reference is held against what rounding activations costs at all."""
    torch.manual_seed(1)
    sequences = [torch.randint(V, (length,)).tolist() for length in (5, 1)]
    paged = PagedRun(model, ops, sequences, 4, torch.float32)
    paged.step({0: 5, 1: 1})
    for ours, tokens in zip(paged.logits, sequences, strict=True):
        exact = logits_of(reference, tokens)
        if recipe.activations is None:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=2e-4)
            continue
        with float8_products(rounded, recipe):
            expected = logits_of(reference, tokens)
        cost = (expected - exact).abs().mean()
        assert cost > 1e-3
        assert (ours - expected).abs().mean() < cost / 20


@pytest.mark.parametrize("name", RECIPES)
def test_float8_multiplied_as_it_is_gives_the_logits_of_transformers(tmp_path, name):
    recipe = RECIPES[name]
    reference = reference_of(QWEN2 if "static" in name else LLAMA)
    rounded = write_float8(tmp_path, reference, recipe)
    ops = triton_for(tmp_path)
    model = load(tmp_path, ops)
    by_format = ops.weight_packing(torch.float32).bytes_by_format()
    assert by_format.pop("float32") == 2 * V * 256 * 4  # embedding and head
    num_linear = 256 * (256 + 64 + 64) + 256 * 256 + 3 * 256 * 256
    ((kept, num_bytes),) = by_format.items()
    suffix = "" if recipe.activations else "-w8a16"
    assert kept == "fp8" + "-block" * (recipe.weights == "block") + suffix
    assert num_linear < num_bytes < 1.05 * num_linear
    assert_as_transformers(model, reference, rounded, recipe, ops)


@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed-tensors by tensor, static"])
def test_a_gpu_without_float8_keeps_the_weights_and_rounds_no_activations(
    tmp_path, name, monkeypatch
):
    reference = reference_of(LLAMA)
    rounded = write_float8(tmp_path, reference, RECIPES[name])
    ops = triton_for(tmp_path)
    monkeypatch.setattr(operations, "multiplies_float8", lambda device: False)
    model = load(tmp_path, ops)
    kept = set(ops.weight_packing(torch.float32).bytes_by_format()) - {"float32"}
    assert kept == {"fp8-block-w8a16" if "blocks" in name else "fp8-w8a16"}
    alone = RECIPES["compressed-tensors, weights alone"]
    assert_as_transformers(model, reference, rounded, alone, ops)


def assert_as_kept_on_a_cpu(folder, reference, ops, tokens=(5, 3, 1, 60, 2)):
    """Beside what rounding inputs to bytes costs at all: see GPTQ's test."""
    model = load(folder, ops)
    rounded_inputs = as_a_cpu_keeps_it(reference, folder)
    exact = logits_of(reference, tokens)
    with rounded_inputs:
        expected = logits_of(reference, tokens)
    paged = PagedRun(model, ops, [list(tokens)], 4, torch.float32)
    paged.step({0: len(tokens)})
    by_rounding = (expected - exact).norm()
    assert 0.001 * exact.norm() < by_rounding < 0.05 * exact.norm()
    assert (paged.logits[0] - expected).norm() < 0.2 * by_rounding


native = pytest.mark.parametrize("ops", ["native"], indirect=True)


@native
@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed-tensors by tensor, static"])
def test_a_cpu_multiplies_bytes_keeps_them_and_says_so(tmp_path, ops, name, monkeypatch):
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path / "cache"))
    reference = reference_of(LLAMA)
    write_float8(tmp_path, reference, RECIPES[name], num_shards=2)
    files = open_model_files(str(tmp_path), report=print)
    wanted = "fp8-block" if "blocks" in name else "fp8"
    for _ in range(2):
        loaded = load_any_model(EngineOptions(model=str(tmp_path)), files, CPU)
        assert loaded.weights == f"Q8_0+float32 (from {wanted})"
        assert loaded.is_quantised
        for thread in threading.enumerate():
            if thread.name == "weight-cache":
                thread.join()
        monkeypatch.setattr(packing, "as_blocks", None)  # the next start reads what was kept
    monkeypatch.undo()
    assert_as_kept_on_a_cpu(tmp_path, reference, ops)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_without_native_kernels_or_if_told_so_a_cpu_dequantises_it(tmp_path, ops):
    reference = reference_of(LLAMA)
    rounded = write_float8(tmp_path, reference, RECIPES["fp8 in blocks"])
    alone = RECIPES["compressed-tensors, weights alone"]
    assert_as_transformers(load(tmp_path, ops), reference, rounded, alone, ops)
    files = open_model_files(str(tmp_path), report=print)
    for told in ({"dtype": "float32"}, {"quantization": "none"}):
        loaded = load_any_model(EngineOptions(model=str(tmp_path), **told), files, CPU)
        assert loaded.weights == "float32 (dequantised from fp8-block)"
        assert not loaded.is_quantised


@pytest.mark.parametrize(
    "name",
    ["fp8 in blocks", "compressed-tensors by channel", "compressed-tensors by tensor, static"],
)
def test_norms_and_activations_round_for_the_products_behind_them_with_equal_bits(
    tmp_path, name, monkeypatch
):
    rounded = []

    def counted(*args, **how):
        rounded.append(args)
        return quantise_rows(*args, **how)

    monkeypatch.setattr(fp8_linear, "quantise_rows", counted)
    config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 2})
    write_float8(tmp_path, reference_of(config), RECIPES[name])

    def run():
        ops = triton_for(tmp_path)
        paged = PagedRun(load(tmp_path, ops), ops, [[3, 1, 4, 1, 5], [9]], 4, torch.float32)
        paged.step({0: 5, 1: 1})
        return paged.logits, len(rounded)

    together, num_alone = run()
    assert num_alone == 3  # before both output projections, and behind the first layer's first norm
    rounded.clear()
    monkeypatch.setattr(TritonOperations, "input_rounding", lambda ops, weight: None)
    apart, num_alone = run()
    assert num_alone == 8
    for ours, expected in zip(together, apart, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "name", ["fp8 in blocks", "compressed-tensors by tensor, static", "fp8 by tensor"]
)
def test_experts_in_float8_give_the_logits_of_transformers(tmp_path, name):
    recipe = RECIPES[name]
    reference = reference_of(EXPERTS)
    rounded = write_float8(tmp_path, reference, recipe)
    ops = triton_for(tmp_path)
    model = load(tmp_path, ops)
    by_format = ops.weight_packing(torch.float32).bytes_by_format()
    assert by_format["float32"] == (2 * V + 3) * 256 * 4  # embedding, head and router
    assert_as_transformers(model, reference, rounded, recipe, ops)


@native
@pytest.mark.parametrize("config", [EXPERTS, LATENTS], ids=["experts", "latents"])
def test_experts_and_latents_on_a_cpu_are_bytes_too(tmp_path, ops, config):
    reference = reference_of(config)
    write_float8(tmp_path, reference, RECIPES["fp8 in blocks"])
    # latents are multiplied with queries, not with keys: of one token it makes no difference
    tokens = (5, 3, 1, 60, 2) if config is EXPERTS else (5,)
    assert_as_kept_on_a_cpu(tmp_path, reference, ops, tokens)


def test_inputs_that_are_no_whole_number_of_blocks_are_dequantised(tmp_path):
    config = transformers.LlamaConfig(**{**SHAPE, "intermediate_size": 200})
    reference = reference_of(config)
    rounded = write_float8(tmp_path, reference, RECIPES["fp8 in blocks"])
    ops = triton_for(tmp_path)
    model = load(tmp_path, ops)
    by_format = ops.weight_packing(torch.float32).bytes_by_format()
    assert by_format["float32"] == (2 * V * 256 + 256 * 200) * 4
    down = reference.model.layers[0].mlp.down_proj.weight
    del rounded[down.untyped_storage().data_ptr()]
    recipe = RECIPES["fp8 in blocks"]
    assert_as_transformers(model, reference, rounded, recipe, ops)


@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed-tensors by tensor, static"])
def test_ranks_take_their_part_at_the_borders_of_blocks(tmp_path, name):
    write_float8(tmp_path, reference_of(LLAMA), RECIPES[name])
    tensors = open_model_files(str(tmp_path), report=print).tensors(keeps_blocks=True)
    part = dict(tensors)["model.layers.0.mlp.up_proj.weight"]
    whole = part.dequantise()
    rows = part.narrow(0, 40, 200, num_zeros=2)
    assert rows.shape == (162, 256)
    assert torch.equal(rows.dequantise()[:160], whole[40:200])
    assert not rows.dequantise()[160:].any()
    assert torch.equal(part.narrow(1, 128, 256).dequantise(), whole[:, 128:])
    inside = part.narrow(1, 64, 256)
    if "blocks" in name:
        assert inside is None
    else:
        assert torch.equal(inside.dequantise(), whole[:, 64:])
        assert torch.equal(inside.arrays["input_scale"], part.arrays["input_scale"])


def test_scales_of_a_cache_are_left_out_by_name(tmp_path, caplog):
    layer = "model.layers.0.self_attn"
    more = {f"{layer}.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    more[f"{layer}.q_proj.input_scale"] = torch.tensor(1.0)
    write_float8(tmp_path, reference_of(LLAMA), RECIPES["fp8 by tensor"], more=more)
    with caplog.at_level(logging.WARNING):
        files = open_model_files(str(tmp_path), report=print)
    assert f"3 scales of keys, values or activations are not used ({layer}.k_scale" in caplog.text
    assert not any(name.endswith("_scale") for name, _ in files.tensors())


def changed(recipe, **fields):
    """Of its config, a group's part named in the field: "weights__num_bits"."""
    config = json.loads(json.dumps(recipe.config))
    for path, value in fields.items():
        *parts, last = path.split("__")
        target = (
            config["config_groups"]["group_0"] if parts or last == "output_activations" else config
        )
        for part in parts:
            target = target[part]
        target[last] = value
    return config


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        ("fp8 in blocks", {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ("fp8 in blocks", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8 in blocks", {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ("fp8 in blocks", {"activation_scheme": "static"}, "in blocks, with .*'static'"),
        ("compressed-tensors by channel", {"weights__num_bits": 4}, "in 4 bits of type float"),
        ("compressed-tensors by channel", {"weights__type": "int"}, "in 8 bits of type int"),
        ("compressed-tensors by channel", {"format": "pack-quantized"}, "'pack-quantized'"),
        ("compressed-tensors by channel", {"weights__strategy": "group"}, "by group"),
        ("compressed-tensors by channel", {"input_activations__dynamic": False}, "by token"),
        ("compressed-tensors by channel", {"output_activations": {"num_bits": 8}}, "output_act"),
        ("compressed-tensors by channel", {"sparsity_config": {"format": "2:4"}}, "sparse"),
        ("compressed-tensors by channel", {"config_groups": {}}, "without config_groups"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, recipe, fields, message):
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": changed(RECIPES[recipe], **fields)})
    )
    with pytest.raises(UnsupportedModelFile, match=message):
        open_model_files(str(tmp_path), report=print)


def test_files_that_contradict_their_config_are_refused(tmp_path):
    write_float8(tmp_path, reference_of(LLAMA), RECIPES["fp8 in blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"

    def opened(changes):
        save(
            tmp_path,
            {key: value for key, value in (tensors | changes).items() if value is not None},
        )
        files = open_model_files(str(tmp_path), report=print)
        return list(files.tensors(keeps_blocks=True))

    with pytest.raises(BrokenModelFile, match=r"shape \[1, 2\], not \[2, 2\], its blocks"):
        opened({f"{name}.weight_scale_inv": torch.ones(1, 2)})
    with pytest.raises(BrokenModelFile, match=rf"{name}.weight is torch.float32"):
        opened({f"{name}.weight": torch.ones(256, 256)})
    with pytest.raises(BrokenModelFile, match=rf"lacks weight of the float8 layer {name}"):
        opened({f"{name}.weight": None})
    with pytest.raises(BrokenModelFile, match=rf"{name}.weight is .*e4m3fn without a scale"):
        opened({f"{name}.weight_scale_inv": None})
    plain = {key: value for key, value in tensors.items() if not key.endswith("_inv")}
    save(tmp_path, plain)
    with pytest.raises(UnsupportedModelFile, match="no tensor is called weight_scale"):
        open_model_files(str(tmp_path), report=print)
