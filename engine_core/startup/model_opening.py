"""The model's files as the options name them, open and checked, with the tokenizer built.

All that can be said of a model without torch: a wrong name or a broken file ends the start before
torch is imported. Must not know weights.
"""

import dataclasses
import logging

from engine_core.errors import StartupError
from engine_core.model_files import (
    ConfigOnly,
    ModelFiles,
    ModelFilesError,
    TokenizerFiles,
    open_model_files,
)
from engine_core.options.engine import EngineOptions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's files and what its clients need of them; None: they must send token ids."""

    files: ModelFiles
    tokenizer: TokenizerFiles | None


def open_model(options: EngineOptions) -> OpenModel:
    """
    Raises:
        StartupError: with one line for the operator.
    """
    try:
        files = _open(options)
        tokenizer = files.tokenizer()
    except ModelFilesError as error:
        raise StartupError(str(error)) from error
    if tokenizer is None:
        logger.warning("the model has no tokenizer: clients must send token ids")
    return OpenModel(files, tokenizer)


def _open(options: EngineOptions) -> ModelFiles:
    if options.load_format == "dummy":
        assert options.model_config is not None, "EngineOptions.check was not called"
        return ConfigOnly(options.model_config)
    assert options.model is not None, "EngineOptions.check was not called"
    return open_model_files(options.model, tokenizer=options.tokenizer, report=logger.info)
