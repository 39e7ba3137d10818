"""What an encoder's tensors must be, whatever the family: names, dtypes and shapes, before anything
runs."""

from collections.abc import Mapping, Sequence

from engine_core.models.multimodal.interface import Tensors

FLOATS = ("float32", "float16")
INTS = ("int64", "int32")


def check_tensors(
    modality: str, tensors: Tensors, modalities: Sequence[str], takes: Mapping[str, Sequence[str]]
) -> None:
    """
    Args:
        modalities: that the model takes.
        takes: dtypes that each tensor may have, by name.

    Raises:
        ValueError: other tensors; value, limit, next action.
    """
    if modality not in modalities:
        raise ValueError(
            f"an input is of type {modality!r}, the model takes {', '.join(modalities)}; send those"
        )
    if tensors.keys() != takes.keys():
        raise ValueError(
            f"an input of type {modality!r} has the tensors {sorted(tensors)}, it must have "
            f"{sorted(takes)}; send what the model's own processor makes"
        )
    for name, dtypes in takes.items():
        if tensors[name].dtype.name not in dtypes:
            raise ValueError(
                f"{name} is {tensors[name].dtype.name}, it must be one of {', '.join(dtypes)}"
            )


def wrong_shape(name: str, shape: Sequence[int], wanted: str) -> str:
    """The error's text."""
    return (
        f"{name} has shape {list(shape)}, the model takes {wanted}; send what its own processor "
        "makes"
    )
