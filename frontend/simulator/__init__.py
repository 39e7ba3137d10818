"""The simulator: the production scheduler and cache in virtual time, with a trace instead of
clients and step times instead of a model runner. `engine-core plan` and `simulate` run it. It alone
beside `cluster` knows the engine. Reads no clock."""

from engine_core.errors import ConfigurationError


class SimulationError(ConfigurationError):
    """The simulation cannot be done as asked; the text names value, limit and next action. Any
    function of this package may raise it: for an option or argument outside its limits, a file that
    cannot be read, a bad row in a trace, or a run that does not end."""
