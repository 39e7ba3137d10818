"""What can be wrong with a model before it runs.

ModelError
    UnsupportedArchitecture    we have no exact code for it; another implementation may
    ModelConfigError           its config.json contradicts itself or lacks something
    ModelWeightsError          its tensors are not those that the config describes
"""


class ModelError(Exception):
    """A model cannot be built; the message says which part and why."""


class UnsupportedArchitecture(ModelError):
    """Our own model code does not compute this model exactly."""


class ModelConfigError(ModelError):
    """The config is missing a field, or a field has an impossible value."""


class ModelWeightsError(ModelError):
    """Tensors are missing, unexpected, doubled or of a wrong shape."""
