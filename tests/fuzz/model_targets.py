"""Targets that read a model's files: GGUF, folders of safetensors, tokenizers."""

import atexit
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.mutation import Target


def _scratch() -> Path:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _opener() -> Callable[[Path], None]:
    """Does what the daemon does with a model's files before it builds the model."""
    import torch

    from engine_core.model_files import ModelFilesError, open_model_files
    from engine_core.models.errors import ModelError
    from engine_core.models.registry import read_model_config

    def open_all(path: Path) -> None:
        try:
            files = open_model_files(str(path), report=lambda line: None)
            _ = files.eos_token_ids, files.fingerprint
            files.tokenizer()
        except ModelFilesError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000, "one line, not a screen"
            return
        with contextlib.suppress(ModelError):
            read_model_config(files.config)
        with contextlib.suppress(ModelFilesError):
            for keeps_blocks in (True, False):
                for _, part in files.tensors(keeps_blocks=keeps_blocks):
                    if isinstance(part, torch.Tensor):
                        part.numel()

    return open_all


def gguf() -> Target:
    import gguf as writer_package
    import numpy as np

    from engine_core.model_files.gguf.header import GgmlType

    folder, open_all = _scratch(), _opener()
    file = folder / "fuzz.gguf"

    def written(keys: dict, tensors: dict) -> list[bytes]:
        from tests.engine_core.model_files.conftest import add_key

        keys = dict(keys)
        writer = writer_package.GGUFWriter(folder / "seed", keys.pop("general.architecture"))
        for key, value in keys.items():
            add_key(writer, key, value)
        for name, tensor in tensors.items():
            if isinstance(tensor, tuple):
                writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
            else:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [(folder / "seed").read_bytes()]

    def shape(architecture: str) -> dict:
        return {
            "general.architecture": architecture,
            f"{architecture}.block_count": 1,
            f"{architecture}.context_length": 64,
            f"{architecture}.embedding_length": 32,
            f"{architecture}.feed_forward_length": 32,
            f"{architecture}.attention.head_count": 2,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        }

    ggml = "tokenizer.ggml."
    tokens = ["<s>", "</s>", "a", "b", "ab", "<0x41>"]
    of_bytes = {
        ggml + "model": "gpt2", ggml + "pre": "llama-bpe", ggml + "tokens": tokens,
        ggml + "token_type": [3, 3, 1, 1, 1, 6], ggml + "merges": ["a b"],
        ggml + "bos_token_id": 0, ggml + "eos_token_id": 1, ggml + "add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    pieces = {
        ggml + "model": "llama", ggml + "tokens": tokens,
        ggml + "scores": [0.0, 0.0, -1.0, -2.0, -3.0, 0.0],
        ggml + "token_type": [3, 3, 1, 1, 1, 6], ggml + "bos_token_id": 0,
        ggml + "eos_token_id": 1, ggml + "unknown_token_id": 2,
    }  # fmt: skip
    embedding = {"token_embd.weight": np.ones((6, 32), np.float32)}
    norm = {"output_norm.weight": np.ones(32, np.float32)}
    query = {
        "blk.0.attn_q.weight": (np.zeros((32, 34), np.uint8), GgmlType.Q8_0),
        "blk.0.attn_k.weight": np.ones((32, 32), np.float16),
    }
    scaled = {
        "llama.rope.freq_base": 10000.0, "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.original_context_length": 32,
        "llama.attention.sliding_window": 16,
    }  # fmt: skip
    experts = {"llama.expert_count": 2, "llama.expert_used_count": 1}
    stack = {"blk.0.ffn_gate_exps.weight": np.ones((2, 32, 32), np.float32)}
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    window = {"gemma3.attention.sliding_window": 8, "gemma3.attention.head_count_kv": 1}
    seeds = [
        written(shape("llama") | of_bytes, embedding | norm | query | factors),
        written(shape("llama") | pieces | scaled, embedding),
        written(shape("gemma3") | pieces | window, embedding | norm),
        written(shape("llama") | experts, embedding | stack),
        written(shape("qwen3") | {"qwen3.attention.head_count": [2, 2]} | of_bytes, embedding),
        written(shape("qwen2") | {"general.alignment": 64}, embedding | norm),
    ]

    def run(parts: list[bytes]) -> None:
        if parts:
            file.write_bytes(parts[0])
            open_all(file)

    import torch  # noqa: F401 (not to be counted)

    names = (
        "token_embd.weight",
        "general.alignment",
        "llama.rope.scaling.type",
        "gemma3",
        "qwen3moe",
    )
    lengths = tuple(len(name).to_bytes(8, "little") + name.encode() for name in names)
    return Target(run, seeds, lengths)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 6,
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": [1], "hidden_act": "silu",
}  # fmt: skip
_VARIANTS = (
    {},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "head_dim": 16,
     "architectures": ["Qwen3ForCausalLM"], "max_window_layers": 1, "use_sliding_window": False},
    {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
     "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": ["sliding_attention"],
     "hidden_activation": "gelu_pytorch_tanh"},
    {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 8,
     "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": None,
     "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1,
     "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
     "norm_topk_prob": True},
)  # fmt: skip


def safetensors() -> Target:
    """A folder: config.json, model.safetensors, and, if not empty, the index and
    generation_config.json."""
    import torch
    from safetensors.torch import save

    folder, open_all = _scratch(), _opener()

    def run(parts: list[bytes]) -> None:
        names = ("config.json", "model.safetensors", "model.safetensors.index.json",
                 "generation_config.json")  # fmt: skip
        for name, part in zip(names, [*parts, b"", b"", b"", b""], strict=False):
            (folder / name).unlink(missing_ok=True)
            if part:
                (folder / name).write_bytes(part)
        open_all(folder)

    plain = {
        "model.embed_tokens.weight": torch.ones(6, 32),
        "model.norm.weight": torch.ones(32, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(32, dtype=torch.float16),
    }
    layer = "model.layers.0.self_attn.q_proj."
    gptq = {
        layer + "qweight": torch.ones(4, 32, dtype=torch.int32),
        layer + "qzeros": torch.ones(1, 4, dtype=torch.int32),
        layer + "scales": torch.ones(1, 32, dtype=torch.float16),
        layer + "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    awq = {
        layer + "qweight": torch.ones(32, 4, dtype=torch.int32),
        layer + "qzeros": torch.ones(1, 4, dtype=torch.int32),
        layer + "scales": torch.ones(1, 32, dtype=torch.float16),
    }
    seeds = []
    for variant in _VARIANTS:
        method = variant.get("quantization_config", {}).get("quant_method")
        tensors = {"gptq": gptq, "awq": awq, None: plain}[method]
        index = json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}).encode()
        config = json.dumps(_LLAMA | variant).encode()
        with_index = index if method is None and variant else b""
        seeds.append([config, save(tensors, {"format": "pt"}), with_index, b'{"top_k": 5}'])
    return Target(run, seeds)


def tokenizer() -> Target:
    """tokenizer.json and tokenizer_config.json of a folder, then what a client makes of them; the
    last part is a text."""
    from engine_core.model_files import ModelFilesError
    from engine_core.model_files.hf_tokenizer import read_folder_tokenizer
    from frontend.errors import InvalidInput
    from frontend.text.tokenizer import Tokenizer
    from protocol.outputs import TokenizerInfo
    from tests.frontend.text import tokenizer_samples as samples

    folder = _scratch()

    def run(parts: list[bytes]) -> None:
        document, config, text = (*parts, b"", b"", b"")[:3]
        (folder / "tokenizer.json").write_bytes(document)
        (folder / "tokenizer_config.json").write_bytes(config or b"{}")
        try:
            files = read_folder_tokenizer(folder)
        except ModelFilesError:
            files = None
        made = files.tokenizer_json if files is not None else document
        special = files.special_tokens if files is not None else {}
        info = TokenizerInfo(
            fingerprint="", tokenizer_json=None, chat_template=None, special_tokens=special
        )
        try:
            client = Tokenizer.from_welcome(info, made)
        except ValueError:
            return
        try:
            ids = client.encode(text.decode("utf-8", "replace")[:200])
            client.decode(ids[:50])
            pieces = client.pieces
            for token_id in [*ids[:20], 0, 1, 2**31]:
                pieces.text(token_id), pieces.level_bytes(token_id), pieces.fallback_byte(token_id)
        except InvalidInput:
            pass

    config = {
        "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True},
        "added_tokens_decoder": {"3": {"content": "<new>", "special": True}},
        "additional_special_tokens": ["<x>"],
        "chat_template": [{"name": "default", "template": "x"}],
    }  # fmt: skip
    makers = (
        samples.byte_level, samples.llama2, samples.gemma, samples.metaspace, samples.word_piece,
        samples.byte_fallback_metaspace, samples.no_decoder,
    )  # fmt: skip
    seeds = []
    for make in makers:
        document = json.loads(make().to_str())
        seeds.append(
            [json.dumps(document).encode(), json.dumps(config).encode(), "hé 漢 a<s>".encode()]
        )
    return Target(run, seeds)
