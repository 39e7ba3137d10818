"""Logits with adapters equal PEFT's, on tiny random models; and a batch of several adapters gives
each row the bits that it has alone."""

import functools

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine_core.adapters.pool import AdapterPool
from engine_core.models.loading import load_model
from kernels.cpu.linear import NativeLinear
from kernels.cpu.operations import CpuOperations
from kernels.cpu.weights import quantise_int4
from kernels.interface.weights import QuantisedTensor
from kernels.torch import recurrence
from kernels.triton.operations import TritonOperations
from tests.engine_core.conftest import PagedRun
from tests.engine_core.models.decoder_cases import deepseek_like
from tests.engine_core.models.hybrid_cases import (
    bamba,
    falcon_h1,
    granite,
    kimi_linear,
    lfm2,
    lfm2_moe,
    lfm3,
    minimax,
    nemotron_h,
    published,
)
from tests.engine_core.models.latent_cases import minicpm3
from tests.engine_core.models.qwen_hybrid_cases import qwen3_5_moe, qwen3_next
from tests.native_kernels import native_library_or_skip

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "head_dim": 8,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        query_pre_attn_scalar=11,
    ),
    "glm4": transformers.Glm4Config(**SHAPE, pad_token_id=0),
    "cohere2": transformers.Cohere2Config(
        **{**SHAPE, "head_dim": 4}, sliding_window_pattern=2, sliding_window=6, logit_scale=0.5
    ),
    "hunyuan": transformers.HunYuanDenseV1Config(**SHAPE, pad_token_id=0),
    "starcoder2": transformers.Starcoder2Config(**{**SHAPE, "head_dim": 4}),
    "gemma4": transformers.Gemma4TextConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=12,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=131,
        sliding_window=6,
    ),
    "gemma3n": transformers.Gemma3nTextConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.9, 0.0],
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=131,
        laurel_rank=6,
    ),
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=10,
        linear_value_head_dim=7,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    ),
}
ADAPTERS = {
    "all": {"r": 5, "lora_alpha": 16, "target_modules": "all-linear"},
    "attention": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.v_proj": 40},
        "alpha_pattern": {"o_proj": 20},
    },
    "one layer": {
        "r": 64,
        "lora_alpha": 64,
        "target_modules": ["gate_proj", "down_proj", "k_proj"],
        "layers_to_transform": [1],
    },
}
FACTORS = [0.9, 1.1, 0.8, 1.2, 0.7]
LENGTHS = (23, 1, 17, 9)


@functools.cache
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(131, (n,), generator=generator).tolist() for n in LENGTHS]


_made = {}
"""By family: the order of the tests makes pytest give up a fixture between two of them."""


@pytest.fixture(params=CONFIGS)
def made(request, tmp_path_factory):
    """(config, weights, folders by adapter, PEFT's logits by adapter and sequence)."""
    if request.param not in _made:
        _made[request.param] = make(CONFIGS[request.param], tmp_path_factory)
    return _made[request.param]


def make(config, tmp_path_factory, adapters=ADAPTERS):
    peft = pytest.importorskip("peft")  # 3 s, which each test process would spend to list its tests
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    base = base.eval()
    if base._can_set_experts_implementation():
        base.set_experts_implementation("eager")
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    if config.model_type == "kimi_linear":  # whose checkpoints have other names
        weights = published(base)
    folders, logits = {}, {None: logits_of(base)}
    for name, options in adapters.items():
        model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.3)
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(folders[name])
        logits[name] = logits_of(model.eval())
        base = model.unload()
    return config, weights, folders, logits


@torch.inference_mode()
def logits_of(model):
    return [model(input_ids=torch.tensor([each])).logits[0] for each in sequences()]


class AdapterRun(PagedRun):
    """Sequence i has the adapter `adapters[i]`."""

    def __init__(self, model, ops, folders, adapters, which=(0, 1, 2, 3)):
        super().__init__(model, ops, [sequences()[i] for i in which], 4, torch.float32)
        self.pool = AdapterPool(
            model, ops, num_slots=3, max_rank=64, max_num_tokens=256, dtype=torch.float32
        )
        self.slots = []
        for adapter in adapters:
            slot = -1
            if adapter is not None:
                slot = list(folders).index(adapter)
                self.pool.place(slot, *self.pool.read(folders[adapter]))
            self.slots.append(slot)

    def step(self, counts):
        slots = [self.slots[i] for i, count in counts.items() for _ in range(count)]
        self.pool.rows.begin_step(torch.tensor(slots, dtype=torch.int32).numpy())
        super().step(counts)


def run(model, ops, folders, adapters, steps, which=(0, 1, 2, 3)):
    paged = AdapterRun(model, ops, folders, adapters, which)
    for counts in steps:
        paged.step(counts)
    return paged.logits


STEPS = [{0: 9, 1: 1, 2: 17}, {0: 1, 3: 5}, {0: 12, 3: 1}, {0: 1, 3: 1}, {3: 1}, {3: 1}]


def our_model(config, weights, ops):
    return load_model(config.to_dict(), weights.items(), dtype=torch.float32, ops=ops)


def test_a_batch_of_several_adapters_and_none_equals_peft(made, ops):
    config, weights, folders, expected = made
    adapters = ["all", None, "attention", "one layer"]
    model = our_model(config, weights, ops)
    logits = run(model, ops, folders, adapters, STEPS)
    for number, adapter in enumerate(adapters):
        difference = (logits[number] - expected[adapter][number]).abs().max()
        assert difference < 1e-4, (adapter, difference)
        if adapter is not None:  # and the adapter matters
            assert (logits[number] - expected[None][number]).abs().max() > 0.1


def test_an_adapter_changes_columns_that_a_file_has_in_another_order(made, ops):
    """Those of `out_proj` of a GGUF file: the first head of every key head, then the second."""
    config, weights, folders, expected = made
    if config.model_type != "qwen3_5_text":
        return
    name = "model.layers.0.linear_attn.out_proj.weight"
    tiled = weights[name].unflatten(1, (2, 3, 7)).transpose(1, 2).flatten(1)
    fields = config.to_dict() | {"linear_output_tiled": True}
    tensors = (weights | {name: tiled}).items()
    model = load_model(fields, tensors, dtype=torch.float32, ops=ops)
    logits = run(model, ops, folders, ["all", None, "all", None], STEPS)
    for number, adapter in enumerate(["all", None, "all"]):
        assert (logits[number] - expected[adapter][number]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (
            granite(["linear_attention", "full_attention"], num_local_experts=0),
            ["in_proj", "out_proj", "q_proj"],
        ),
        (
            granite(["linear_attention", "full_attention"], num_local_experts=4),
            ["in_proj", "v_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"],
        ),
        (
            nemotron_h(["mlp", "linear_attention", "full_attention"]),
            ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"],
        ),
        (bamba(2, [1]), ["in_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]),
        (lfm2(["conv", "full_attention"]), "all-linear"),
        (lfm2_moe(["conv", "full_attention"]), ["w1", "w2", "w3", "conv.in_proj", "out_proj"]),
        (qwen3_5_moe(["linear_attention", "full_attention"]), "all-linear"),
        (
            qwen3_next(["linear_attention", "full_attention"]),
            ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"],
        ),
        (  # of which PEFT takes no out_proj
            falcon_h1(1, key_multiplier=0.6, ssm_in_multiplier=1.3, ssm_multipliers=FACTORS),
            ["in_proj", "q_proj", "k_proj"],
        ),
        (lfm3(["conv", "sliding_attention"]), ["in_proj", "out_proj", "q_proj", "g_proj"]),
        (
            kimi_linear(["linear_attention", "full_attention"], mlp_layer_types=["dense"] * 2),
            ["q_proj", "b_proj", "f_a_proj", "f_b_proj", "g_b_proj", "o_proj"],
        ),
        (
            minimax(["linear_attention", "full_attention"]),
            ["qkv_proj", "output_gate", "q_proj", "o_proj"],
        ),
        (
            deepseek_like(transformers.Glm4MoeConfig, initializer_range=0.1),
            ["q_proj", "v_proj", "o_proj"],
        ),
        (minicpm3(initializer_range=0.1), ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
    ],
)
def test_products_of_layers_that_keep_other_things_take_adapters(
    config, targets, tmp_path_factory, ops
):
    options = {"own": {"r": 5, "lora_alpha": 16, "target_modules": targets}}
    config, weights, folders, expected = make(config, tmp_path_factory, options)
    model = our_model(config, weights, ops)
    logits = run(model, ops, folders, ["own", None, "own", None], STEPS)
    for number, adapter in enumerate(["own", None]):
        assert (logits[number] - expected[adapter][number]).abs().max() < 1e-4
    assert (logits[0] - expected[None][0]).abs().max() > 0.1


def test_a_row_has_the_same_bits_alone_in_one_piece_and_in_any_batch(made, ops):
    config, weights, folders, _ = made
    is_torch = config.model_type == "qwen3_5_text" and ops.recur is recurrence.recur
    if is_torch or ops.name.startswith("torch"):
        return  # it chooses its products by the number of rows
    adapters = ["all", None, "attention", "one layer"]
    model = our_model(config, weights, ops)
    mixed = run(model, ops, folders, adapters, STEPS)
    for number, adapter in enumerate(adapters):
        steps = [{0: LENGTHS[number]}]
        alone = run(model, ops, folders, [adapter], steps, which=(number,))
        assert torch.equal(alone[0], mixed[number])


@pytest.mark.slow
@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
def test_the_gpu_kernels_equal_peft_and_rows_have_the_same_bits_alone(made):
    config, weights, folders, expected = made
    ops = TritonOperations(torch.device("cpu"), batch_invariant=True)
    model = our_model(config, weights, ops)
    adapters = ["all", "one layer"]
    mixed = run(model, ops, folders, adapters, [{0: 3, 1: 4}, {1: 1, 0: 2}], which=(3, 2))
    for number, (adapter, which) in enumerate(zip(adapters, (3, 2), strict=True)):
        length = 5
        difference = mixed[number][:length] - expected[adapter][which][:length]
        assert difference.abs().max() < 1e-4
        alone = run(model, ops, folders, [adapter], [{0: length}], which=(which,))
        assert torch.equal(alone[0][:length], mixed[number][:length])


QUANTISED = transformers.LlamaConfig(
    **SHAPE
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
)


def rounded(module, args):
    """As native integer products see their inputs: signed bytes, a scale for 32 of them."""
    groups = args[0].unflatten(-1, (-1, 32))
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return ((torch.round(groups / scales) * scales).flatten(-2),)


def int8_numbers(weight):
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(weight / scales) * scales


def in_blocks(weight, type_name):
    """A part as a GGUF file's, and its numbers as the gguf package reads them."""
    kind = GGMLQuantizationType[type_name]
    blocks = torch.from_numpy(quantize(weight.numpy(), kind))
    numbers = torch.from_numpy(dequantize(blocks.numpy(), kind))
    part = QuantisedTensor(type_name, tuple(weight.shape), {"blocks": blocks}, lambda _: numbers)
    return part, numbers


def quantised(weights, kind, library):
    """What the engine loads, and the numbers that it stands for, by name."""
    loaded, numbers = {}, {}
    for name, weight in weights.items():
        is_vocabulary = "embed_tokens" in name or "lm_head" in name
        loaded[name] = numbers[name] = weight
        if weight.dim() == 1:
            continue
        if kind.startswith("Q"):
            loaded[name], numbers[name] = in_blocks(weight, "Q8_0" if is_vocabulary else kind)
        elif kind == "int8" or is_vocabulary:
            numbers[name] = int8_numbers(weight)
        else:
            rows = torch.arange(len(weight))
            numbers[name] = NativeLinear(library).gather_rows(rows, quantise_int4(library, weight))
    return loaded, numbers


@pytest.mark.parametrize("kind", ["int8", "int4", "Q8_0", "Q4_1"])
def test_on_quantised_weights_an_adapter_is_added_in_float32(kind, tmp_path):
    """PEFT over the dequantised model, whose own products alone have rounded inputs."""
    peft = pytest.importorskip("peft")
    library = native_library_or_skip()
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(QUANTISED, attn_implementation="eager")
    loaded, numbers = quantised(base.eval().state_dict(), kind, library)
    ops = CpuOperations(library, linear_weights=kind if kind.startswith("int") else "float32")
    ours = our_model(QUANTISED, loaded, ops)
    base.load_state_dict(numbers)
    options = {"r": 5, "lora_alpha": 16, "target_modules": "all-linear"}
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options)).eval()
    for key, value in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(tmp_path)
    logits = torch.cat(run(ours, ops, {"all": tmp_path}, ["all"] * 4, STEPS))
    exact = torch.cat(logits_of(model))
    hooks = [
        layer.register_forward_pre_hook(rounded)
        for name, layer in model.named_modules()
        if name.endswith(("base_layer", "lm_head"))
    ]
    assert len(hooks) == 7 + 1
    expected = torch.cat(logits_of(model))
    differences = (logits - expected).abs().amax(dim=1)
    by_rounding = (expected - exact).norm()
    assert 0.001 * exact.norm() < by_rounding < 0.05 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert differences.quantile(0.9) < 1e-4
    assert (logits - expected).norm() < 0.2 * by_rounding
    for layer in model.modules():  # so it would be, were the adapter given rounded inputs, too
        if hasattr(layer, "base_layer"):
            layer.register_forward_pre_hook(rounded)
    assert (logits - torch.cat(logits_of(model))).norm() > by_rounding
