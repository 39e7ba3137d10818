"""A model's weights in another form, so that every engine of a comparison runs the same numbers.

    python scripts/export_model.py smollm2-135m-instruct --folder OUT      a Hugging Face folder
    python scripts/export_model.py smollm2-135m-instruct --gguf OUT.gguf --type F32

A folder is float32 safetensors with the dequantised weights, for engines that read no GGUF or do
not keep its numbers. A .gguf file takes over a .gguf's metadata; its tensors are dequantised and
written as F32, F16 or Q8_0 (what is no matrix stays F32). Nothing is ever written over.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files

_OWN_FIELDS = ("GGUF.", "general.architecture", "general.quantization_version", "general.file_type")


class ExportError(Exception):
    """It cannot be written; the text says why."""


def main(arguments: list[str]) -> int:
    """Exit code for the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--folder", type=Path)
    target.add_argument("--gguf", type=Path)
    parser.add_argument("--type", choices=("F32", "F16", "Q8_0"), default="F32")
    given = parser.parse_args(arguments)
    path: Path = given.folder or given.gguf
    try:
        if path.exists():
            raise ExportError(f"{path} is there already; remove it or name another")
        files = open_model_files(given.model, report=lambda line: print(line, file=sys.stderr))
        if given.folder:
            write_folder(files, path)
        else:
            write_gguf(files, path, given.type)
    except (ExportError, ModelFilesError) as error:
        print(f"export_model: {error}", file=sys.stderr)
        return 1
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
        described["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", described)


def write_gguf(files: ModelFiles, path: Path, type_name: str) -> None:
    """
    Raises:
        ExportError: the model is not one .gguf file.
    """
    import gguf

    if files.path.suffix != ".gguf":
        raise ExportError(f"{files.path} is no .gguf file, whose metadata would be taken over")
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
    sys.exit(main(sys.argv[1:]))
