"""The logits processors that the operator names: found, imported and made at start."""

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from engine_core.errors import ConfigurationError
from engine_core.logits_processors import (
    ENTRY_POINT_GROUP,
    NamedProcessor,
    ServedVocabulary,
    what_failed,
)

_METHODS = ("validate_params", "add_row", "remove_row", "apply")


def load_processors(
    names: Sequence[str], vocabulary: ServedVocabulary
) -> tuple[NamedProcessor, ...]:
    """Of each name the class of the entry point of that name, or of `module:Class`, made. No other
    entry point is loaded. Raises ConfigurationError: there is none, or it is no processor."""
    if len(set(names)) < len(names):
        raise ConfigurationError("--logits-processors names one twice; name it once")
    made = []
    for name in names:
        try:
            processor = _imported(name)(vocabulary)
            is_list = isinstance(processor.extra_args, tuple | list | set | frozenset)
            if not is_list or not all(isinstance(each, str) for each in processor.extra_args):
                raise TypeError("extra_args must be a list of names")
            for method in ("validate_params", "add_row", "remove_row", "apply"):
                getattr(processor, method)
        except ConfigurationError:
            raise
        except Exception as error:  # of foreign code
            raise ConfigurationError(
                f"--logits-processors: {what_failed(name, error)}; install its package or put its "
                "folder into PYTHONPATH, and see engine_core.logits_processors.LogitsProcessor"
            ) from error
        made.append(NamedProcessor(name, processor))
    return tuple(made)


def _imported(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if colon:
        return getattr(importlib.import_module(module), attribute)
    offered = entry_points(group=ENTRY_POINT_GROUP)
    points = list(offered.select(name=name))
    if not points:
        raise ConfigurationError(
            f"--logits-processors {name}: no installed package has it as an entry point of group "
            f"{ENTRY_POINT_GROUP} (there are: {', '.join(sorted(offered.names)) or 'none'}); "
            "install one, or write module:Class"
        )
    if len({point.value for point in points}) > 1:
        raise ConfigurationError(
            f"--logits-processors {name}: several packages offer it, as "
            f"{' and '.join(sorted(point.value for point in points))}; write one of these"
        )
    return points[0].load()
