"""A byte-level BPE vocabulary of a GGUF file (`tokenizer.ggml.model` "gpt2") as tokenizer.json.

Must not know special tokens or the ends of a text; see `gguf_tokenizer`.
"""

from typing import Any

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.gguf.pre_tokenizers import PreTokenizer


def byte_level_json(
    file: str, tokens: list[str], merges: list[str], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of the tokenizer.json.

    Args:
        file: for messages.
        tokens: by id, spelled in GPT-2's byte alphabet.
        merges: "left right", best first.

    Raises:
        BrokenModelFile: a merge makes a token that is not in the vocabulary.
    """
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise BrokenModelFile(
                f"{file}: merge {merge!r} needs tokens that are not in the vocabulary; convert the "
                f"model again, or name a tokenizer with --tokenizer"
            )
        pairs.append((left, right))
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.normalize_nfc else None,
        "pre_tokenizer": pre_tokenizer.to_json(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocab,
            "merges": pairs,
        },
    }
