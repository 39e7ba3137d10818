"""Which reader takes a folder, by `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine_core.model_files.bitsandbytes import read_bitsandbytes
from engine_core.model_files.compressed_tensors import read_compressed_tensors, read_modelopt
from engine_core.model_files.errors import UnsupportedModelFile
from engine_core.model_files.float8 import read_float8
from engine_core.model_files.grouped_integers import read_grouped_integers
from engine_core.model_files.json_file import read_json_object_if_present
from engine_core.model_files.mxfp4 import Mxfp4Experts
from engine_core.model_files.quantised_layers import INSTEAD, Fields, NotRead, QuantisedLayers

_READERS: Mapping[str, Callable[[Fields], QuantisedLayers]] = {
    "gptq": read_grouped_integers,
    "awq": read_grouped_integers,
    "auto-round": read_grouped_integers,
    "fp8": read_float8,
    "fbgemm_fp8": read_float8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "bitsandbytes": read_bitsandbytes,
    "mxfp4": lambda fields: Mxfp4Experts(),
}
_OTHERS = ", or a version in GPTQ, AWQ, FP8 or compressed-tensors"
_INSTEAD = {
    "mlx": "MLX's layout is of Apple's library: " + INSTEAD + _OTHERS,
    "exl2": "its layout is ExLlama's own: " + INSTEAD + _OTHERS,
    "exl3": "its layout is ExLlama's own: " + INSTEAD + _OTHERS,
    "torchao": "its tensors are pickles of torchao: save it with compressed-tensors, or " + INSTEAD,
    "quanto": "save the model unquantised, and quantise it with compressed-tensors, or " + INSTEAD,
    "hqq": "save the model unquantised, and quantise it with compressed-tensors, or " + INSTEAD,
    "eetq": INSTEAD + ", which --quantization int8 rounds in the same way",
    "quark": INSTEAD + ", or export it from Quark in FP8, AWQ or a .gguf",
}


def read_quantisation(config: Mapping[str, Any], folder: Path) -> QuantisedLayers | None:
    """What config.json says, or hf_quant_config.json of ModelOpt; None: nothing is quantised.
    Raises UnsupportedModelFile: a method, or a variant of one, that is not read."""
    fields = config.get("quantization_config") or config.get("compression_config")
    if not fields:
        beside = read_json_object_if_present(folder / "hf_quant_config.json").get("quantization")
        if not beside:
            return None
        fields = {"quant_method": "modelopt", **beside}
    fields = fields if isinstance(fields, dict) else {}
    method = fields.get("quant_method")
    if method is None and config.get("quantization"):
        method = "mlx"
    try:
        reader = _READERS.get(method) if isinstance(method, str) else None
        if reader is None:
            raise NotRead("", _INSTEAD.get(str(method), INSTEAD + _OTHERS))
        return reader(fields)
    except NotRead as error:
        raise UnsupportedModelFile(
            f"{folder} is quantised with {method or 'an unnamed method'}{' ' * bool(str(error))}"
            f"{error}, which is not read; {error.instead}"
        ) from error
