"""What a rank takes of a checkpoint. Whole models: tests/engine_core/distributed."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from quantised_folders import METHODS, random_layer

from engine_core.distributed.parallel import Parallel
from engine_core.layers.vocabulary import token_ranges
from engine_core.model_files.gguf.dequantize import dequantize
from engine_core.model_files.gguf.header import GgmlType
from engine_core.model_files.grouped_integers import read_grouped_integers
from engine_core.models.errors import ModelConfigError, ModelWeightsError
from engine_core.models.layer_cache import State
from engine_core.models.parallel.sharding import Sharding, allowed_sizes
from engine_core.models.parallel.stages import split_layers
from engine_core.models.registry import read_model_config
from kernels.cpu.linear import NativeLinear
from kernels.cpu.packing import NativePacking
from kernels.interface.weights import QuantisedTensor
from tests.native_kernels import native_library_or_skip


def config_of(**options):
    shape = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "architectures": ["LlamaForCausalLM"],
    }
    return read_model_config({**shape, **options})


def test_layers_without_keys_stay_on_one_rank_and_may_be_in_stages():
    config = config_of(num_hidden_layers=3)
    state = State(((8,),), (torch.float32,), ((8,),), (torch.float32,))
    layers = (state, *config.spec.layers[1:])
    config = dataclasses.replace(config, spec=dataclasses.replace(config.spec, layers=layers))
    assert allowed_sizes(config) == [1]
    for num_stages in (1, 3):
        stages = split_layers(config, num_stages)
        assert [layer for stage in stages for layer in stage.layers] == [0, 1, 2]


def shardings(config, size, **options):
    return [Sharding(config, Parallel(tp_rank=r, tp_size=size), **options) for r in range(size)]


@pytest.mark.parametrize(
    ("options", "size", "why"),
    [
        ({}, 2, "9 attention heads cannot be shared by 2 ranks; use one of 1, 3, 9"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, 3, "use one of 1, 2, 4, 8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "4 key/value heads cannot be shared by 6 ranks; use one of 1, 2, 4, 12",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            3,
            "layers of this family cannot be .* use one of 1$",
        ),
        (
            {"architectures": ["BambaForCausalLM"], "mamba_n_heads": 8, "mamba_d_head": 16},
            3,
            "8 heads or channels of recurrent layers cannot be shared by 3 ranks; use one of 1$",
        ),
        ({"intermediate_size": 2}, 3, "a feed-forward of 2 cannot be .* use one of 1$"),
        ({"vocab_size": 8}, 9, "8 tokens cannot be shared by 9 ranks; use one of 1, 3$"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused_with_numbers_that_can(options, size, why):
    with pytest.raises(ModelConfigError, match=f"--tensor-parallel-size {size}: .*{why}"):
        Sharding(config_of(**options), Parallel(tp_rank=0, tp_size=size))


def test_heads_are_split_or_repeated():
    config = config_of(num_attention_heads=12, num_key_value_heads=4)
    weight = torch.arange(4 * 64.0)[:, None].expand(-1, 64)
    for size, heads in ((2, [(0, 1), (2, 3)]), (4, [(0,), (1,), (2,), (3,)])):
        for sharding, mine in zip(shardings(config, size), heads, strict=True):
            assert sharding.config.spec.keys_of(0).num_kv_heads == len(mine)
            taken = sharding.take("model.layers.0.self_attn.k_proj.weight", weight)
            assert taken[::64, 0].tolist() == [64 * head for head in mine]
    for rank, sharding in enumerate(shardings(config, 12)):
        spec = sharding.config.spec
        assert (spec.num_query_heads, spec.keys_of(0).num_kv_heads) == (1, 1)
        taken = sharding.take("model.layers.0.self_attn.v_proj.bias", weight[:, 0])
        assert taken[0] == 64 * (rank // 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [5, 100, 131, 49152, 262145])
def test_every_token_is_one_rank_s_and_every_rank_has_some(vocab_size, size):
    ranges = token_ranges(vocab_size, size)
    assert [token for tokens in ranges for token in tokens] == [*range(vocab_size)]
    assert all(ranges)


def test_a_feed_forward_is_cut_at_block_borders_if_there_are_enough_blocks():
    starts = [
        [
            sharding.cut("model.layers.0.mlp.down_proj.weight").ranges[0].start
            for sharding in shardings(
                config_of(num_attention_heads=8, num_key_value_heads=8),
                size,
                block_inputs=(32, 256),
            )
        ]
        for size in (4, 8)
    ]
    assert starts == [[0, 256, 768, 1024], [0, 192, 384, 576, 768, 960, 1152, 1344]]


def quantised(type_name, shape, order=None):
    kind = GgmlType[type_name]
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    blocks = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]))

    def decode(arrays):
        rows = arrays["blocks"]
        columns = rows.shape[1] // kind.block_bytes * kind.block_elements
        return dequantize(rows.reshape(-1), kind, (len(rows), columns))

    return QuantisedTensor(
        type_name, shape, {"blocks": blocks}, decode, order, block_inputs=kind.block_elements
    )


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "Q5_0", "Q4_1"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_blocks_stay_blocks_with_the_same_numbers(type_name, is_ordered):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) if is_ordered else None
    part = quantised(type_name, (96, 192), order)
    whole = part.dequantise()
    rows = part.narrow(0, 33, 90)
    assert rows.shape == (57, 192)
    assert torch.equal(rows.dequantise(), whole[33:90])
    columns = part.narrow(1, 64, 160)
    assert columns.shape == (96, 96)
    assert torch.equal(columns.dequantise(), whole[:, 64:160])
    padded = part.narrow(0, 33, 90, num_zeros=2)
    assert torch.equal(padded.dequantise(), torch.cat([whole[33:90], torch.zeros(2, 192)]))
    assert part.narrow(1, 16, 48) is None


@pytest.mark.parametrize("is_ordered", [False, True])
def test_rows_of_several_kinds_of_heads_stay_blocks(is_ordered):
    """q, k and v of a gated delta net: 2 heads of 10, 2 of 10, 6 of 32, of which a rank has half;
    what sums over heads has the first of each key head, then the second ones."""
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 32,
        "linear_output_tiled": True,
    }
    config = config_of(
        architectures=["Qwen3_5ForCausalLM"], num_attention_heads=6, num_key_value_heads=2, **heads
    )
    generator = torch.Generator().manual_seed(0)
    part, outputs = (
        quantised("Q4_0", (n, e), torch.randperm(n, generator=generator) if is_ordered else None)
        for n, e in ((232, 64), (64, 192))
    )
    whole, whole_outputs = part.dequantise(), outputs.dequantise().view(64, 3, 2, 32)
    for rank, sharding in enumerate(shardings(config, 2)):
        taken = sharding.take("model.layers.0.linear_attn.in_proj_qkv.weight", part)
        assert taken.arrays.keys() == {"blocks"}
        q, k, v = 10 * rank, 20 + 10 * rank, 40 + 96 * rank
        mine = torch.cat([whole[q : q + 10], whole[k : k + 10], whole[v : v + 96]])
        assert torch.equal(taken.dequantise(), mine)
        taken = sharding.take("model.layers.0.linear_attn.out_proj.weight", outputs)
        assert taken.arrays.keys() == {"blocks"}
        assert torch.equal(taken.dequantise(), whole_outputs[:, :, rank].flatten(1))


@pytest.mark.parametrize("name", ["gptq 8 bits", "awq"])
def test_rows_of_several_kinds_of_heads_stay_integers(name):
    """q, k and v of a gated delta net: 2 heads of 16, 2 of 16, 4 of 8, of which a rank has half."""
    how = METHODS[name]
    layer, weight = random_layer(96, 64, how, np.random.default_rng(0))
    part = read_grouped_integers(how).as_one("layer", layer)
    whole = torch.from_numpy(weight)
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    }
    config = config_of(
        architectures=["Qwen3_5ForCausalLM"], num_attention_heads=6, num_key_value_heads=2, **heads
    )
    for rank, sharding in enumerate(shardings(config, 2)):
        taken = sharding.take("model.layers.0.linear_attn.in_proj_qkv.weight", part)
        assert taken.type_name == part.type_name
        q, k, v = 16 * rank, 32 + 16 * rank, 64 + 16 * rank
        mine = torch.cat([whole[q : q + 16], whole[k : k + 16], whole[v : v + 16]])
        assert torch.equal(taken.dequantise(), mine)


def test_blocks_that_a_head_would_cut_become_floats():
    """9 heads of 16: a rank's 48 columns end within a block of 32."""
    part = quantised("Q4_0", (64, 160), None)
    config = config_of(head_dim=16, num_attention_heads=10, num_key_value_heads=10)
    _, last = shardings(config, 2)
    taken = last.take("model.layers.0.self_attn.o_proj.weight", part)
    assert torch.equal(taken, part.dequantise()[:, 80:])


@pytest.mark.parametrize("floats", ["float32", "int4"])
def test_what_is_quantised_at_load_has_the_numbers_of_the_whole_matrix(floats):
    library = native_library_or_skip()
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(0))

    def numbers(part):
        packed = NativePacking(library, floats).pack("layer", [part])
        return NativeLinear(library).gather_rows(torch.arange(len(part)), packed)

    assert torch.equal(numbers(weight[:, 64:160]), numbers(weight)[:, 64:160])
    assert torch.equal(numbers(weight[7:20]), numbers(weight)[7:20])


def test_a_bias_that_is_added_to_a_sum_is_the_first_rank_s():
    bias = torch.ones(64)
    first, *others = shardings(config_of(), 3)
    for name in ("self_attn.o_proj", "mlp.down_proj", "mixer.out_proj"):
        assert first.take(f"model.layers.0.{name}.bias", bias) is bias
        assert not any(each.take(f"model.layers.0.{name}.bias", bias).any() for each in others)


def test_a_tensor_of_another_size_is_refused_before_it_is_cut():
    sharding = shardings(config_of(), 3)[0]
    with pytest.raises(ModelWeightsError, match=r"has shape \[101, 64\], config.json asks for 100"):
        sharding.take("model.embed_tokens.weight", torch.zeros(101, 64))
