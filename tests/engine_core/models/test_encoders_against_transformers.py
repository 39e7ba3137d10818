"""Every family of encoders against transformers: hidden states of mixed prompts of one step, and
heads. Tiny random weights."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.loading import load_model
from engine_core.models.registry import read_model_config
from kernels.cpu.operations import CpuOperations
from kernels.torch.operations import TorchOperations
from tests.engine_core.models.encoder_cases import (
    BARE,
    CONFIGS,
    VOCAB_SIZE,
    hidden_states,
    own,
    reference,
    run,
    token_types,
)
from tests.native_kernels import native_library_or_skip


@pytest.fixture(scope="module", params=["native", "torch"])
def ops(request):
    if request.param == "torch":
        return TorchOperations()
    return CpuOperations(native_library_or_skip())


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize(
    ("family", "kind"),
    [*itertools.product(CONFIGS, ["Model", "ForMaskedLM"]), *((each, "Model") for each in BARE)],
)
def test_hidden_states_of_mixed_prompts(ops, family, kind):
    model, asked = reference(family, kind), prompts(1, 7, 33, 150, 16)
    types = token_types(model, asked)
    encoder = own(model, ops)
    for _ in range(2):  # captured, then run again
        found = run(encoder, ops, asked, types)
        for ours, theirs in zip(found, hidden_states(model, asked, types), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert getattr(encoder._forward, "is_captured", True), "an operation is not native"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Bert", {"hidden_act": "gelu_new"}),
        ("Bert", {"hidden_act": "relu"}),
        ("Roberta", {"type_vocab_size": 1, "pad_token_id": 0}),
        ("Electra", {"embedding_size": 48}),
        ("DistilBert", {"activation": "relu"}),
        ("Gte", {"type_vocab_size": 0, "hidden_act": "silu"}),
        ("JinaEmbeddingsV3", {"type_vocab_size": 2, "hidden_act": "gelu_new"}),
        ("NomicBert", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
        ("DebertaV2", {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"}),
        ("DebertaV2", {"type_vocab_size": 2, "position_biased_input": True}),
        ("T5Encoder", {"feed_forward_proj": "gated-gelu"}),
        ("ModernBert", {"hidden_activation": "silu", "attention_bias": True, "mlp_bias": True}),
        ("ModernBert", {"hidden_activation": "gelu_pytorch_tanh", "norm_bias": True}),
    ],
)
def test_options_of_a_family(ops, family, options):
    model, asked = reference(family, **options), prompts(3, 40)
    types = token_types(model, asked)
    found = run(own(model, ops), ops, asked, types)
    for ours, theirs in zip(found, hidden_states(model, asked, types), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_of_heads(ops, family, kind):
    options = {"classifier_pooling": "mean"} if family == "ModernBert" else {}
    model, asked = reference(family, kind, num_labels=3, **options), prompts(9, 1)
    types = token_types(model, asked)
    encoder = own(model, ops)
    for ours, ids, kinds in zip(run(encoder, ops, asked, types), asked, types, strict=True):
        pooling = encoder.head.config.pooling
        states = {"cls": ours[:1], "mean": ours.mean(0, keepdim=True), "tokens": ours}[pooling]
        typed = (
            {"token_type_ids": kinds[None]} if getattr(model.config, "type_vocab_size", 0) else {}
        )
        with torch.inference_mode():
            expected = model(ids[None], **typed).logits
            logits = encoder.compute_logits(states.clone())
        torch.testing.assert_close(logits, expected.view(logits.shape), atol=1e-4, rtol=0)


def test_a_prompt_has_the_same_bits_alone_and_among_others():
    ops = CpuOperations(native_library_or_skip())
    for family in ("Bert", "MPNet", "DebertaV2", "T5Encoder", "ModernBert"):
        model, asked = reference(family), prompts(5, 61, 120, 17)
        encoder, types = own(model, ops), token_types(model, asked)
        together = run(encoder, ops, asked, types)
        for number in range(len(asked)):
            one = slice(number, number + 1)
            assert torch.equal(run(encoder, ops, asked[one], types[one])[0], together[number])


def test_first_checkpoints_names_of_norms():
    model = reference("Bert", "ForMaskedLM")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in model.state_dict().items()
    }
    model.state_dict = lambda: renamed
    own(model, TorchOperations())


_FIRST_NOMIC = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}


def first_nomic(config):
    """As nomic-embed-text-v1.5 was published."""
    first = {"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0}
    first |= {"max_trained_positions": 160, "n_positions": 8192, "qkv_proj_bias": False}
    first |= {"rotary_emb_scale_base": None, "vocab_size": VOCAB_SIZE, "type_vocab_size": 2}
    return first | {name: config[own] for own, name in _FIRST_NOMIC.items()}


def first_gte(config):
    """As gte-multilingual-base was: angles of theta 20,000 in eight times the length."""
    del config["rope_parameters"]
    return config | {"rope_theta": 20_000, "rope_scaling": {"type": "ntk", "factor": 8.0}}


@pytest.mark.parametrize(
    ("family", "options", "first", "architecture", "prefix"),
    [
        ("NomicBert", {}, first_nomic, "NomicBertModel", ""),
        (
            "Gte",
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 160_000.0,
                    "factor": 8 ** (2 / 12),
                }
            },
            first_gte,
            "NewModel",
            "new.",
        ),
    ],
)
def test_fields_and_tensors_as_first_published(
    family, options, first, architecture, prefix, tmp_path
):
    """Tensors by the names that transformers knows them by and writes again."""
    model, asked, ops = reference(family, **options), prompts(40), TorchOperations()
    model.save_pretrained(tmp_path)
    config = first(model.config.to_dict()) | {"architectures": [architecture]}
    tensors = load_file(tmp_path / "model.safetensors")
    assert any("encoder.layer" in name for name in tensors), "names of today"
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    encoder = load_model(config, tensors.items(), dtype=torch.float32, ops=ops)
    assert encoder.spec.max_model_len == 160
    types = token_types(model, asked)
    (found,), (expected,) = run(encoder, ops, asked, types), hidden_states(model, asked, types)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


_TASKS = ["retrieval.query", "retrieval.passage", "separation"]


@pytest.mark.parametrize("task", [None, *_TASKS[1:]])
def test_a_tasks_low_rank_changes_as_first_published(task, tmp_path):
    """As jina-embeddings-v3 was: what its model becomes, less what a task adds to it."""
    model, asked, ops = reference("JinaEmbeddingsV3"), prompts(40), TorchOperations()
    model.save_pretrained(tmp_path)
    published, scale, rank = {}, 2 / 5, 5
    for name, whole in load_file(tmp_path / "model.safetensors").items():
        name = f"roberta.{name}"
        if whole.dim() == 1 or ".norm" in name:
            published[name] = whole
            continue
        rows, columns = whole.shape
        is_table = "embeddings" in name
        a = torch.randn(3, *((rows, rank) if is_table else (rank, columns)))
        b = torch.randn(3, *((rank, columns) if is_table else (rows, rank)))
        change = torch.zeros_like(whole)
        if task is not None:
            at = _TASKS.index(task)
            change = scale * torch.einsum("ir,ro->io" if is_table else "ro,ir->io", a[at], b[at])
        module = name.removesuffix(".weight")
        parts = {"0.lora_B": b, "original": whole - change, "0.lora_A": a}
        published |= {f"{module}.parametrizations.weight.{p}": each for p, each in parts.items()}
    config = model.config.to_dict() | {"architectures": ["XLMRobertaModel"]}
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20_000.0}
    config |= {"lora_adaptations": _TASKS, "lora_alpha": 2, "lora_rank": rank, "jina_task": task}
    del config["rope_parameters"]
    encoder = load_model(config, published.items(), dtype=torch.float32, ops=ops)
    types = token_types(model, asked)
    (found,), (expected,) = run(encoder, ops, asked, types), hidden_states(model, asked, types)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_xlm_roberta_of_jinas_own_code():
    """Tensors as jina-reranker-v2-base-multilingual has them; positions are embedded."""
    model = reference("XLMRoberta", "ForSequenceClassification", num_labels=1, type_vocab_size=1)
    published = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in (
            ("embeddings.LayerNorm", "emb_ln"),
            ("attention.output.dense", "mixer.out_proj"),
            ("attention.output.LayerNorm", "norm1"),
            ("intermediate.dense", "mlp.fc1"),
            ("output.dense", "mlp.fc2"),
            ("output.LayerNorm", "norm2"),
            ("encoder.layer.", "encoder.layers."),
        ):
            name = name.replace(ours, theirs)
        head, _, tail = name.partition("attention.self.")
        name = f"{head}mixer.Wqkv.{tail.partition('.')[2]}" if tail else name
        published[name] = (
            torch.cat([published[name], tensor]) if tail and name in published else tensor
        )
    config = {**model.config.to_dict(), "architectures": ["XLMRobertaForSequenceClassification"]}
    ops, asked = TorchOperations(), prompts(40)
    encoder = load_model(config, published.items(), dtype=torch.float32, ops=ops)
    (states,) = run(encoder, ops, asked, token_types(model, asked))
    with torch.inference_mode():
        found, expected = encoder.compute_logits(states[:1].clone()), model(asked[0][None]).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"architectures": ["LukeModel"]}, UnsupportedArchitecture, "LukeModel has no native"),
        ({"hidden_act": "mish"}, UnsupportedArchitecture, 'hidden_act "mish"'),
        ({"is_decoder": True}, UnsupportedArchitecture, "is_decoder True is not supported"),
        (
            {"position_embedding_type": "relative_key"},
            UnsupportedArchitecture,
            "position_embedding_type 'relative_key'",
        ),
        (
            {"architectures": ["NomicBertModel"], "activation_function": "gelu"},
            UnsupportedArchitecture,
            'activation_function "gelu" is not supported; supported: swiglu, geglu',
        ),
        (
            {"architectures": ["NomicBertModel"], "moe_every_n_layers": 2},
            UnsupportedArchitecture,
            "moe_every_n_layers 2 is not supported",
        ),
        (
            {"architectures": ["JinaEmbeddingsV3Model"], "jina_task": "separation"},
            ModelConfigError,
            "jina_task is 'separation', the tasks of this checkpoint are none",
        ),
        (
            {"architectures": ["NewModel"], "logn_attention_scale": True},
            UnsupportedArchitecture,
            "logn_attention_scale True is not supported",
        ),
        (
            {"architectures": ["ModernBertModel"], "hidden_activation": "relu"},
            UnsupportedArchitecture,
            'hidden_activation "relu" is not supported',
        ),
        ({"num_attention_heads": 5}, ModelConfigError, "768, not a multiple of the 5 heads"),
        (
            {"architectures": ["DebertaV2Model"], "conv_kernel_size": 3},
            UnsupportedArchitecture,
            "conv_kernel_size 3 .* serve a model without it",
        ),
        (
            {
                "architectures": ["DebertaV2Model"],
                "relative_attention": True,
                "pos_att_type": "c2p",
            },
            UnsupportedArchitecture,
            "pos_att_type .'c2p'. is not supported, only true with c2p and p2c",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config, error, text):
    with pytest.raises(error, match=text):
        read_model_config({"architectures": ["BertModel"], "model_type": "bert", **config})
