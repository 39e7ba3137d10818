"""A model's dequantised weights as a float32 Hugging Face folder, so that every engine of a
comparison runs the same numbers.

    python scripts/export_model.py smollm2-135m-instruct OUT

Nothing is ever written over.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files
from frontend.load.report import log
from scripts.command_line import make_app, run_app

app = make_app("export_model", __doc__)


@app.default
def export(model: str, folder: Path) -> int:
    """Write a model's weights as a folder."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; remove it or name another")
    write_folder(open_model_files(model, report=log), folder)
    print(folder)
    return 0


def write_folder(files: ModelFiles, folder: Path) -> None:
    """config.json, model.safetensors in float32, and the tokenizer's files."""
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in files.tensors():
        assert isinstance(tensor, torch.Tensor), "blocks come only where they were asked for"
        tensors[name] = tensor.to(torch.float32).contiguous().clone()
    if files.config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", files.config | {"torch_dtype": "float32"})
    if files.generation_config:
        _write_json(folder / "generation_config.json", files.generation_config)
    tokenizer = files.tokenizer()
    if tokenizer is None:
        return
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    described |= tokenizer.special_tokens
    if tokenizer.chat_template is not None:
        named = {"default": tokenizer.chat_template, **tokenizer.named_chat_templates}
        entries = [{"name": name, "template": source} for name, source in named.items()]
        described["chat_template"] = entries if len(named) > 1 else tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", described)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(ModelFilesError, OSError)))
