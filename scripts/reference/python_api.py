"""Pages of which mkdocstrings makes the Python API and the errors, of signatures and docstrings."""

import frontend
from frontend import errors

_PYTHON = """\
# Python
The public names of `frontend`; names and meanings are those of vLLM where it has them. A
`docs/...` in a text is a page of this site.
"""
_FIRST = ("LLM", "AsyncLLM", "SamplingParams", "BeamSearchParams", "PoolingParams")
_ERRORS = """\
# Errors
What the Python client raises, why an engine refuses a request, and how processes end.

```text
TREE
```

EXCEPTIONS
## Why a request is refused
The `code` of [RequestRejected][frontend.errors.RequestRejected].

::: protocol.errors.ErrorCode

## Exit codes of engine-core
::: engine_core.errors.ExitCode

`engine-client` ends with 0, 1 after a fault, 2 after wrong options, 3 where the address to listen
at is taken, and 130 after Ctrl-C.
"""


def python_page() -> str:
    others = [name for name in frontend.__all__ if name not in _FIRST]
    shown = [name for name in others if not issubclass(_class(name), Exception)]
    parts = [f"\n::: frontend.{name}\n" for name in (*_FIRST, *shown)]
    return _PYTHON + "".join(parts) + "\nExceptions are on the page of [errors](errors.md).\n"


def errors_page() -> str:
    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    shown = "".join(
        f"::: frontend.errors.{name}\n\n"
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EngineClientError)
    )
    return _ERRORS.replace("TREE", tree).replace("EXCEPTIONS", shown)


def _class(name: str) -> type:
    value = getattr(frontend, name)
    return value if isinstance(value, type) else object
