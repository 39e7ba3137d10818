"""Why a grammar cannot be used."""


class GrammarError(Exception):
    """
    Args:
        why: for the user.
        field: what of the request it is about, where that is not all that was asked for.
        is_lasting: whether the same would be refused again.
    """

    def __init__(self, why: str, *, field: str | None = None, is_lasting: bool = True) -> None:
        super().__init__(why)
        self.field = field
        self.is_lasting = is_lasting
