"""What can go wrong between `--model X` and tensors, as exceptions.

ModelFilesError            base; the message names the file, what is wrong and what to do
├── ModelNotFound          no such path, known name or hub id
├── BrokenModelFile        a file is there, and is truncated, garbage or contradicts itself
├── UnsupportedModelFile   a file is sound, and of a kind that this engine does not read
└── DownloadFailed         a known name or hub id could not be fetched
"""

import os


class ModelFilesError(Exception):
    """Base of everything that `open_model_files` and the objects it returns raise on purpose.

    The message is one line of at most 1,000 characters: a broken file may have names of megabytes.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}")


def unreadable(error: OSError, path: object = "a file of the model") -> str:
    """One line. `path`: of what was opened, where the error does not name a file."""
    action = "check the file"
    if isinstance(error, PermissionError):
        action = f"let user {os.getuid()} read it, and enter its folders"
    return f"{error.filename or path} cannot be read: {error.strerror or error}; {action}"


class ModelNotFound(ModelFilesError):
    """Nothing on disk, in the catalogue or on the hub answers to the name."""


class BrokenModelFile(ModelFilesError):
    """A file is truncated, garbage, or says two things that cannot both hold."""


class UnsupportedModelFile(ModelFilesError):
    """A sound file of a kind, architecture or quantisation that this engine does not read."""


class DownloadFailed(ModelFilesError):
    """A model could not be fetched; the message says from where and what to do instead."""
