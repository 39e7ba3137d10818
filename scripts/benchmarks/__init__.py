"""The commands of `scripts/bench.py`, and what they share. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from scripts.load.report import describe_run, log, write_document

Json = Annotated[Path | None, Parameter(help="Write the document here too.")]
Model = Annotated[str, Parameter(help="A known model, a file or a folder.")]
Rows = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="")]
Repeat = Annotated[
    int, Parameter(help="Medians of this many are reported.", validator=Number(gte=1))
]
DEFAULT_MODEL = "smollm2-135m-instruct"


def report(figures: Mapping[str, Any], json: Path | None, table: str = "") -> None:
    if table:
        log(table)
    write_document(describe_run() | figures, json)
