"""How many examples hypothesis draws: all in `make test-all`, half in `make test`, a tenth in `make
check` (`--hypothesis-profile=thorough` and `check`, registered in tests/conftest.py)."""

from hypothesis import settings


def examples(count):
    """`count` in the thorough profile, in proportion in another one."""
    return max(2, count * settings().max_examples // 100)
