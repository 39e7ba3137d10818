"""No code comes from the wire or from a model file: read in the source of every package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN_MODULES = {
    "pickle",
    "marshal",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
    "yaml",
    "jsonpickle",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def offences(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield name
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch")), keywords=kw):
                safe = [k for k in kw if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                if not safe:
                    yield "torch.load"
            case ast.Call(func=ast.Attribute(attr="recv_pyobj" | "send_pyobj" as name)):
                yield name
            case ast.keyword(arg="trust_remote_code", value=value) if ast.unparse(value) != "False":
                yield "trust_remote_code"


@pytest.mark.parametrize("package", ["frontend", "engine_core", "protocol", "kernels"])
def test_no_package_runs_what_it_is_sent(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    found = {(file.name, what) for file in files for what in offences(ast.parse(file.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)",
    ],
)
def test_what_would_run_it_is_found(line):
    assert list(offences(ast.parse(line)))


def test_what_runs_nothing_is_left_alone():
    lines = "model.eval()\nre.compile(x)\ntorch.load(p, weights_only=True)"
    lines += "\nload(path, trust_remote_code=False)"
    assert not list(offences(ast.parse(lines)))
