"""What the start does beside its own work, each in a Python of its own or undone afterwards."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core import model_files
from engine_core.errors import ExitCode, StartupError
from engine_core.options.engine import EngineOptions
from engine_core.startup import before_torch
from engine_core.startup.before_torch import (
    check_kernels_package,
    load_torch_library_beside,
    no_garbage_collection,
    open_model,
    touch_weight_memory,
)
from kernels.cpu.weight_memory import WEIGHT_MEMORY


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("path", "types", "options", "refusal"),
    [
        ("m.gguf", ["Q4_K"], {"load_format": "gguf", "quantization": "gguf"}, None),
        ("folder", ["awq-int4"], {"load_format": "safetensors", "quantization": "awq"}, None),
        ("folder", ["gptq_v2-int8"], {"quantization": "gptq"}, None),
        ("folder", ["w4a16"], {"quantization": "compressed-tensors"}, None),
        ("folder", ["fp8-block"], {"quantization": "compressed-tensors"}, None),
        ("folder", ["bnb-nf4"], {"quantization": "modelopt"}, "folder are bnb; use auto"),
        ("m.gguf", [], {"load_format": "safetensors"}, "safetensors: .* m.gguf are gguf; use auto"),
        ("folder", [], {"load_format": "gguf"}, "folder are safetensors; use auto"),
        ("folder", [], {"quantization": "awq"}, "--quantization awq: .* are not quantised; use"),
        ("folder", ["gptq-int4"], {"quantization": "awq"}, "folder are gptq; use auto"),
        ("m.gguf", ["Q4_K"], {"quantization": "awq"}, "m.gguf are gguf; use auto"),
        ("folder", ["awq-int4"], {"quantization": "gguf"}, "folder are awq; use auto"),
    ],
)
def test_files_of_another_kind_than_the_options_name_are_refused(
    tmp_path, monkeypatch, path, types, options, refusal
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    files = SimpleNamespace(
        path=Path(path), quantised_types=frozenset(types), tokenizer=list, name="m", config={},
        generation_config={}, weight_files=(), given_tokenizer=None,
        mmproj=None,
    )  # fmt: skip
    monkeypatch.setattr(model_files, "open_model_files", lambda *_args, **_options: files)
    if refusal is None:
        assert open_model(EngineOptions(model="m", **options)).files.path == files.path
        return
    with pytest.raises(StartupError, match=refusal):
        open_model(EngineOptions(model="m", **options))


def test_the_library_is_there_before_torch_and_torch_works_with_it():
    program = """
import sys
from pathlib import Path
from engine_core.startup.before_torch import load_torch_library_beside
thread = load_torch_library_beside()
if thread is None:  # a build for GPUs, or another system
    print("none")
else:
    thread.join()
    print("torch" in sys.modules, "libtorch_cpu" in Path("/proc/self/maps").read_text())
import torch
print((torch.ones(3, 5) @ torch.ones(5, 2)).sum().item())
"""
    *before, product = run(program)
    assert before in (["none"], ["False", "True"])
    assert product == "30.0"


def test_the_interpreter_runs_while_the_library_loads(monkeypatch, tmp_path):
    source, library = tmp_path / "slow.c", tmp_path / "lib" / "libtorch_cpu.so"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) void load(void) { sleep(2); }\n"
    )
    library.parent.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: spec)
    started_s = time.monotonic()
    thread = load_torch_library_beside()
    assert time.monotonic() - started_s < 1.5
    thread.join()
    assert time.monotonic() - started_s > 1.9


@pytest.mark.parametrize(
    ("path", "types", "options", "touched", "needed"),
    [
        ("m.gguf", ["Q4_1"], {}, None, None),
        ("m.gguf", ["Q4_1"], {"dtype": "float32"}, 260, 260),
        ("m.gguf", ["Q4_1"], {"quantization": "none"}, 130, 260),
        ("m.gguf", [], {}, 130, 260),
        (".", ["awq-int4"], {}, None, None),
        (".", [], {"dtype": "bfloat16"}, 130, 130),
        (".", [], {"dtype": "float16"}, None, None),
        (".", [], {"quantization": "int8"}, None, None),
        (".", [], {"model_impl": "transformers"}, None, None),
        (".", [], {"device": "cuda"}, None, None),
    ],
)
@pytest.mark.parametrize("after", [None, threading.current_thread()])
def test_memory_is_touched_where_floats_will_be_packed_on_a_cpu(
    monkeypatch, after, path, types, options, touched, needed
):
    calls = []
    monkeypatch.setattr(
        WEIGHT_MEMORY, "touch_ahead", lambda *args, **named: calls.append((args, named))
    )
    files = SimpleNamespace(path=Path(path), quantised_types=frozenset(types), num_weights=64)
    touch_weight_memory(EngineOptions(model="m", **options), files, after)
    if touched is None or (after is None and options.get("device") != "cpu"):
        assert calls == []
    else:
        assert calls == [((touched,), {"needed_bytes": needed, "after": after})]


def test_an_exit_right_after_it_has_begun_is_clean():
    program = """
from engine_core.startup.before_torch import load_torch_library_beside
load_torch_library_beside()
print("end")
raise SystemExit(0)
"""
    assert run(program) == ["end"]


@pytest.mark.parametrize("library", ["libtorch_cuda.so", "libtorch_hip.so", None])
def test_without_a_library_for_cpus_alone_no_thread_is_started(monkeypatch, tmp_path, library):
    (tmp_path / "lib").mkdir()
    if library is not None:
        (tmp_path / "lib" / "libtorch_cpu.so").touch()
        (tmp_path / "lib" / library).touch()
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: spec)
    assert load_torch_library_beside() is None


def test_without_torch_no_thread_is_started(monkeypatch):
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: None)
    assert load_torch_library_beside() is None


def test_a_library_that_does_not_load_is_left_to_the_import(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"no library")
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: spec)
    thread = load_torch_library_beside()
    thread.join()
    assert not thread.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_comes_back_and_leaves_alone_what_the_start_made(fails):
    kept = []
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
            kept.append([kept])
            if fails:
                raise RuntimeError("the start failed")
    except RuntimeError:
        assert fails
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(thing is kept for thing in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(thing is kept for thing in gc.get_objects())


def test_without_another_kernels_package_nothing_is_said():
    check_kernels_package()


def test_hugging_faces_distribution_of_that_name_is_refused_by_name(tmp_path, monkeypatch):
    """As pip leaves it in a folder of the path, whichever of the two packages is found first."""
    metadata = tmp_path / "kernels-0.17.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: kernels\nVersion: 0.17.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartupError, match=r"Hugging Face \(0\.17\.2\).*pip uninstall"):
        check_kernels_package()


def test_a_daemon_beside_another_package_of_that_name_ends_with_one_line(tmp_path):
    package = tmp_path / "kernels" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('of another distribution')\n")
    (tmp_path / "shape.json").write_text("{}")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import engine_core.cli as c; "
    shape, address = f"--model-config={tmp_path}/shape.json", f"--bind=ipc://{tmp_path}/s"
    done = subprocess.run(
        [sys.executable, "-c", program + "c.main()", "--load-format=dummy", shape, address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.START_FAILED
    [line] = done.stderr.splitlines()
    assert line.startswith("engine-core: the distribution `kernels` of Hugging Face")
    assert f"(at {tmp_path}/kernels)" in line


@pytest.mark.parametrize(
    ("config", "asked", "words"),
    [
        ({"max_position_embeddings": 512}, 513, "is 513, the model was made for 512; lower it"),
        ({"text_config": {"max_position_embeddings": 512}}, 600, "the model was made for 512"),
        ({"max_position_embeddings": 10**9}, 10**8, "is 100000000, this engine has 16777216"),
        ({}, 10**8, "this engine has 16777216 positions"),
    ],
)
def test_a_length_beyond_the_model_is_refused_before_torch(tmp_path, config, asked, words):
    (tmp_path / "shape.json").write_text(json.dumps(config | {"model_type": "llama"}))
    options = f"load_format='dummy', model_config=Path({str(tmp_path)!r}) / 'shape.json'"
    program = f"""
import sys
from pathlib import Path
from engine_core.errors import ConfigurationError
from engine_core.options.engine import EngineOptions
from engine_core.startup.before_torch import open_model
try:
    open_model(EngineOptions({options}, max_model_len={asked}))
except ConfigurationError as error:
    print(error, "torch" in sys.modules)
"""
    said = " ".join(run(program))
    assert words in said
    assert said.endswith("False")


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["backends.py", "__init__.py"])
def test_files_that_went_with_another_package_are_one_line(tmp_path, gone):
    """As `pip uninstall kernels` leaves it."""
    root = Path(before_torch.__file__).parents[2]
    for package in ("engine_core", "protocol", "kernels"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "kernels" / gone).unlink()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = (
        "import sys; sys.meta_path = [each for each in sys.meta_path if '__editable__' not in "
        "str(getattr(each, '__module__', ''))]; import engine_core.cli as c; c.main()"
    )
    started = subprocess.run(
        [sys.executable, "-c", program, "--load-format", "dummy", "--model-config", "config.json",
         "--bind", f"ipc://{tmp_path}/s"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert started.returncode == ExitCode.START_FAILED
    assert "Traceback" not in started.stderr
    assert "install engine-core again" in started.stderr.splitlines()[-1]
