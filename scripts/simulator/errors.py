"""What a user of the simulator can get wrong, as one exception."""


class SimulationError(Exception):
    """The simulation cannot be done as asked; the text names value, limit and next action."""
