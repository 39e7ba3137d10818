"""A model's weights in another form, so that every engine of a comparison runs the same numbers.

    python scripts/export_model.py smollm2-135m-instruct --folder OUT
    python scripts/export_model.py smollm2-135m-instruct --gguf OUT.gguf

A Hugging Face folder holds the dequantised weights in float32, for engines that read no GGUF or do
not keep its numbers. A .gguf file takes over a .gguf's metadata; its tensors are dequantised
and written as F32, F16 or Q8_0 (what is no matrix stays F32). Nothing is ever written over.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files
from scripts.command_line import make_app, run_app
from scripts.load.report import log

_OWN_FIELDS = ("GGUF.", "general.architecture", "general.quantization_version", "general.file_type")
app = make_app("export_model", __doc__)


@app.default
def export(
    model: str,
    *,
    folder: Path | None = None,
    gguf: Path | None = None,
    type: Literal["F32", "F16", "Q8_0"] = "F32",
) -> int:
    """Write a model's weights in another form."""
    path = folder or gguf
    if path is None or (folder and gguf):
        raise ValueError("give either --folder or --gguf")
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it or name another")
    files = open_model_files(model, report=log)
    if folder:
        write_folder(files, path)
    else:
        write_gguf(files, path, type)
    print(path)
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


def write_gguf(files: ModelFiles, path: Path, type_name: str) -> None:
    """Raises ModelFilesError: the model is not one .gguf file."""
    import gguf
    import numpy as np

    if files.path.suffix != ".gguf":
        raise ModelFilesError(
            f"{files.path} is no .gguf file, whose metadata is copied; use --folder"
        )
    reader = gguf.GGUFReader(files.path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(_OWN_FIELDS):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    kind_of_file = "ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"
    writer.add_file_type(gguf.LlamaFileType[kind_of_file])
    wanted = gguf.GGMLQuantizationType[type_name]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(ModelFilesError, OSError)))
