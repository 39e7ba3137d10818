"""Where a rank stands: `tp_size` ranks share each layer of a stage, `pp_size` stages the layers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """
    Attributes:
        tp_rank: of the ranks that share this one's layers.
        pp_rank: of the stage that these are.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError: a rank that is not in its group."""
        for name, rank, size in (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank is {rank}, it must be in [0, {size})")

    @property
    def rank(self) -> int:
        """The rank in [0, world_size): the first stage's ranks come first."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @classmethod
    def of(cls, rank: int, *, tp_size: int, pp_size: int) -> "Parallel":
        """The place of a rank in [0, tp_size * pp_size)."""
        return cls(
            tp_rank=rank % tp_size, tp_size=tp_size, pp_rank=rank // tp_size, pp_size=pp_size
        )
