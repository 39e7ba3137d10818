"""Encoders' GGUF files against transformers: hidden states, tokens, how vectors are pooled."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile, open_model_files
from engine_core.models.encoders.encoder import Encoder
from engine_core.models.loading import load_model
from engine_core.options.pooling import PoolingOptions
from engine_core.pooler_config import PoolingType
from engine_core.startup.pooled_files import pooled_files
from kernels.cpu.operations import CpuOperations
from tests.engine_core.model_files.test_gguf_tokenizer import CONTROL, UNKNOWN
from tests.engine_core.model_files.test_gguf_tokenizer import TEXTS as TOKENIZER_TEXTS
from tests.engine_core.models.encoder_cases import hidden_states, reference, run, token_types
from tests.native_kernels import native_library_or_skip

Q8_0 = gguf.GGMLQuantizationType.Q8_0
CHARSMAP = (
    "eNol03mwDlQUAPDzPYzRjH/CoCK7ZEkkuxAjsmfJmu29vJItS2RPtqcospOUfd+iyPZmtCBZsi+VGQZFGwrR76s785"
    "tz5t6595yZe29kjYh8EdlzRnKMSpCNhfkjlleNyCLPzqhCKZFRXJIvJR6oKVpbNSwlcjwZMdqGHKZyOeBB8pCbvGyo"
    "E5H//xLxMA9RgEd4lIIUphBFKYIyUYySlKAUj1GaxylLGZ6gHFqI8lSkApV4iso8jVajCtWphvajBs9QCy1GbZ6lLv"
    "WpR4PkWs5ENBSf43ka0YTGNKMpLWjOC7SkNa1oSxva8SIdaE8nOvISnelKF7rTjVR68DJppNOTV3mF1+hFH3rTj768"
    "Tn8GMoDBDGIIb/AmQxnOMEYygtHJi+ctxvA2YxnPOCYygQwm8Q6TmcK7vMdUpvE+HzCdmcxgNrOYyxzmM48PWcBHLO"
    "RjFrGYT1jKEpazjJWsYDWrWMsa1rOOjcn3xmY2sYVP+YytbONzvmA7O9nBbnaRyZ6ksYnIXJaIL+V7+Zqv2Mc3HGA/"
    "B/mWQ3zHEQ7zPUc5zjFOcoLTnOIsZzjPOX7kBy7wU9KmRFzYmohL8otc5nqZRFwVr/ALPyfnuMZv/Mof/M4N/uQWN/"
    "mbv7jDbf7hLve5F/99vgoeYWqkpce/g5uONw=="
)
"""Of SentencePiece, compressed: a ligature, tabs, spaces of other widths, A, \u00e9."""
PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz.,;'<|>?=#()2", "▁the", "▁qu", "ick", "own", "er", "▁a"]
TEXTS = [
    *TOKENIZER_TEXTS,
    "Héllo WÖRLD, İstanbul ß ﬁ ①²",
    "[CLS] x [SEP] a[MASK]b  [MASK] <mask> a <mask>b <s>x</s> <unk>",
    "你好world 한국어 ไทย 😀👨‍👩",
    "x" * 120,
    "tab\tnew\nline\u00a0nb\u3000wide\u200b\ufeff\x00\x07q",
    "#hash ##ing ▁x don't $5.00!",
]
EMBEDDING = {"token_embd.weight": np.ones((8, 32), np.float32)}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bert": ("Bert", "bert", {}),
    "RoBERTa, of one token type": ("Roberta", "bert", {"type_vocab_size": 1}),
    "XLM-R": ("XLMRoberta", "bert", {}),
    "DistilBERT": ("DistilBert", "bert", {}),
    "NomicBERT": ("NomicBert", "nomic-bert", {"hidden_act": "silu"}),
    "ModernBERT": ("ModernBert", "modern-bert", {}),
    "ModernBERT with SiLU": ("ModernBert", "modern-bert", {"hidden_activation": "silu"}),
    "jina-embeddings v3": ("JinaEmbeddingsV3", "jina-bert-v3", {}),
}


def converted(
    model: Any, architecture: str, folder: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors as llama.cpp's conversion/bert.py writes them; tensors from a folder, whose
    names are those of first checkpoints."""
    config = model.config
    model.save_pretrained(folder)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    offset = 2 if type(model).__name__.startswith(("Roberta", "XLMRoberta")) else 0
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("pooler."):
            continue
        name = name.removeprefix("roberta.").removeprefix("model.")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = tensor.numpy()
    if "position_embd.weight" in tensors:
        tensors["position_embd.weight"] = tensors["position_embd.weight"][offset:]
    if len(types := tensors.get("token_types.weight", [])) == 1:
        tensors["token_types.weight"] = types[0]  # as llama-quantize writes it
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings - offset,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.hidden_dim,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None)
        or getattr(config, "norm_eps", 1e-12),
        "attention.causal": False,
        "pooling_type": 2,
    }
    rope = getattr(config, "rope_parameters", None) or {}
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        keys["rope.freq_base"] = theta
    if architecture == "modern-bert":
        keys |= {
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "attention.sliding_window": config.local_attention,
            "attention.sliding_window_pattern": 2,
            "hidden_activation": config.hidden_activation,
        }
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture} | named, tensors


def states_of(path: Path, asked: list, types: list, *, keeps_blocks: bool = False) -> list:
    files = open_model_files(str(path), report=print)
    ops = CpuOperations(native_library_or_skip())
    tensors = files.tensors(keeps_blocks=keeps_blocks)
    model = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
    assert isinstance(model, Encoder)
    return run(model, ops, asked, types)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_the_file_are_those_of_transformers(case, write_gguf, tmp_path) -> None:
    family, architecture, options = CASES[case]
    model = reference(family, **options)
    keys, tensors = converted(model, architecture, tmp_path)
    asked = [torch.randint(3, 99, (length,)) for length in (1, 33, 120)]
    types = token_types(model, asked)
    found = states_of(write_gguf(keys, tensors), asked, types)
    for ours, theirs in zip(found, hidden_states(model, asked, types), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "architecture"), [("Bert", "bert"), ("NomicBert", "nomic-bert")]
)
def test_blocks_of_matrices_are_kept(family, architecture, write_gguf, tmp_path) -> None:
    """NomicBERT's queries, keys and values are one matrix of blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"vocab_size": 99, "num_hidden_layers": 2, "max_position_embeddings": 160}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.1)
    model = getattr(transformers, f"{family}Model")(config).eval()
    keys, tensors = converted(model, architecture, tmp_path)
    blocks = {
        name: (gguf.quants.quantize(each, Q8_0), Q8_0)
        for name, each in tensors.items()
        if each.ndim == 2 and not name.startswith(("token_types", "position_embd"))
    }
    path = write_gguf(keys, tensors | blocks)
    asked = [torch.randint(3, 99, (length,)) for length in (7, 40)]
    types = token_types(model, asked)
    expected = hidden_states(model, asked, types)
    for keeps_blocks, least in ((False, 0.9999), (True, 0.999)):
        found = states_of(path, asked, types, keeps_blocks=keeps_blocks)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.cosine_similarity(ours.mean(0), theirs.mean(0), dim=0) > least


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        for pair in (None, "and a second text"):
            found, expected = ours.encode(text, pair), theirs.encode(text, pair)
            assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids), text
            assert ours.decode(found.ids) == theirs.decode(expected.ids)


@pytest.mark.parametrize("is_cased", [True, False])
@pytest.mark.parametrize("is_stated", [True, False])
def test_word_pieces_are_cut_as_by_the_tokenizer_that_was_converted(
    is_cased, is_stated, write_gguf
) -> None:
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    theirs.train_from_iterator([each for each in TEXTS if "漢" not in each], trainer)
    theirs.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    vocab = theirs.get_vocab()
    tokens = [
        token
        if token in special
        else token.removeprefix("##")
        if token.startswith("##")
        else f"▁{token}"
        for token in sorted(vocab, key=lambda token: vocab[token])
    ]
    keys: dict[str, Any] = {"model": "bert", "tokens": tokens, "token_type_count": 2}
    keys["token_type"] = [CONTROL if token in special else 1 for token in tokens]
    for token_id, name in enumerate(("padding", "unknown", "cls", "seperator", "mask")):
        keys[f"{name}_token_id"] = token_id
    if is_stated:
        keys |= {"normalizer.lowercase": not is_cased, "bos_token_id": 2, "eos_token_id": 3}
    assert_same(tokenizer_of(keys, write_gguf), theirs)


def test_a_unigram_is_cut_as_by_the_tokenizer_that_was_converted(write_gguf) -> None:
    """XLM-R's, with a small map of characters that SentencePiece compiled."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    charsmap = zlib.decompress(base64.b64decode(CHARSMAP))
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    spaces = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
    words = {piece: -float(np.float32(at) / 7) for at, piece in enumerate(PIECES)}
    document = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                **dict.fromkeys(("single_word", "rstrip", "normalized"), False),
                "lstrip": token == "<mask>",
                "special": True,
            }
            for token_id, token in enumerate([*special, *PIECES, "<mask>"])
            if token_id < 4 or token == "<mask>"
        ],
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(charsmap).decode(),
        },
        "pre_tokenizer": spaces,
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 2],
            "cls": ["<s>", 0],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 3,
            "vocab": [*((each, 0.0) for each in special), *words.items(), ("<mask>", 0.0)],
            "byte_fallback": False,
        },
    }
    theirs = Tokenizer.from_str(json.dumps(document))
    tokens = [token for token, _ in document["model"]["vocab"]]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [1] * len(PIECES) + [CONTROL]
    keys = {
        "model": "t5",
        "pre": "default",
        "tokens": tokens,
        "scores": [score for _, score in document["model"]["vocab"]],
        "token_type": kinds,
        "precompiled_charsmap": list(charsmap),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "padding_token_id": 1,
        "mask_token_id": len(tokens) - 1,
        "add_bos_token": True,
        "add_eos_token": True,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    }
    ours = tokenizer_of(keys, write_gguf)
    assert ours.encode("ﬁ\tA").ids == ours.encode("fi a").ids
    assert_same(ours, theirs)


def bare_keys(**more: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.layer_norm_epsilon": 1e-12,
    }
    named = {f"bert.{key}": value for key, value in (keys | more).items()}
    return {"general.architecture": "bert"} | named


def tokenizer_of(keys: dict[str, Any], write_gguf) -> Tokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    files = open_model_files(str(write_gguf(bare_keys() | named, EMBEDDING)), report=print)
    tokenizer = files.tokenizer()
    assert tokenizer is not None
    shown = {"bos_token", "eos_token", "unk_token", "pad_token"}
    assert tokenizer.special_tokens.keys() <= shown
    return Tokenizer.from_str(tokenizer.tokenizer_json.decode())


@pytest.mark.parametrize(("kind", "pooling"), [(1, "MEAN"), (2, "CLS"), (3, "LAST")])
def test_files_say_how_to_pool(kind, pooling, write_gguf, tiny_llama_keys) -> None:
    """Encoders', and those of decoders that are made for vectors."""
    encoder, decoder = bare_keys(pooling_type=kind), {**tiny_llama_keys, "llama.pooling_type": kind}
    for keys in (encoder, decoder):
        files = open_model_files(str(write_gguf(keys, EMBEDDING)), report=print)
        pooled = pooled_files(files, PoolingOptions())
        assert pooled.modules is not None
        assert pooled.modules.pooling_type is PoolingType(pooling)
        assert (pooled.generates, pooled.convert) == (False, "embed")
    for keys in (bare_keys(), tiny_llama_keys, bare_keys(pooling_type=0)):
        files = open_model_files(str(write_gguf(keys, EMBEDDING)), report=print)
        assert pooled_files(files, PoolingOptions()).modules is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (bare_keys(pooling_type=4), "pooling_type 4, which is not supported for bert"),
        (bare_keys(pooling_type=9), "pooling_type 9, which is not supported for bert"),
        (bare_keys(**{"attention.causal": True}), "attention.causal True"),
        (bare_keys(expert_count=8), "a mixture of experts"),
        ({"general.architecture": "nomic-bert-moe"}, "'nomic-bert-moe'.*nomic-bert"),
    ],
)
def test_what_encoders_do_not_read_is_refused(keys, message, write_gguf) -> None:
    with pytest.raises(UnsupportedModelFile, match=message):
        open_model_files(str(write_gguf(keys, EMBEDDING)), report=print)


def test_a_decoder_that_sees_to_both_sides_is_refused(write_gguf, tiny_llama_keys) -> None:
    keys = tiny_llama_keys | {"llama.attention.causal": False}
    with pytest.raises(UnsupportedModelFile, match=r"attention\.causal False"):
        open_model_files(str(write_gguf(keys, EMBEDDING)), report=print)


def test_scores_that_are_missing_are_told(write_gguf) -> None:
    with pytest.raises(BrokenModelFile, match="2 tokens have 1 scores"):
        tokenizer_of({"model": "t5", "tokens": ["a", "b"], "scores": [0.0]}, write_gguf)
