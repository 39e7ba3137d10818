"""One JSON object from one file, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from engine_core.model_files.errors import BrokenModelFile


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in `file`.
    Raises BrokenModelFile: unreadable, not UTF-8, not JSON, nested too deeply, or not an object."""
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():  # a surrogate; half of a pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise BrokenModelFile(f"{file} cannot be read: {error.strerror}; check it") from error
    except RecursionError as error:
        raise BrokenModelFile(f"{file} nests too deeply; download or copy it again") from error
    except ValueError as error:
        raise BrokenModelFile(
            f"{file} is not valid JSON ({error}); download or copy it again"
        ) from error
    if not isinstance(value, dict):
        raise BrokenModelFile(
            f"{file} holds a JSON {type(value).__name__}, an object is needed; download it again"
        )
    return value


def read_json_object_if_present(file: Path) -> dict[str, Any]:
    """As `read_json_object`, or an empty dict where there is no such file."""
    return read_json_object(file) if file.is_file() else {}
