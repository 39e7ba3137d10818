"""What is imported is used: the lists of packages that a client, `--help` and a daemon may load.

A name that is missing here is a start that became slower: import it where it is needed, or add it
with a reason.
"""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from daemons import running_daemon
from raw_client import RawClient

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "eos_token_id": 96, "rope_theta": 10000.0,
}  # fmt: skip

OF_THE_INTERPRETER = {"_distutils_hack", "sitecustomize", "usercustomize"}
OF_OPTIONS = {"cyclopts", "attr", "attrs", "typing_extensions"}
OF_HELP = {"rich", "docstring_parser", "pygments"}
OF_MESSAGES = {"zmq", "msgspec", "typing_extensions"}
OF_MODEL_FILES = {"numpy", "safetensors", "tokenizers", "platformdirs"}
OF_TORCH = {"torch", "torchgen", "tqdm"}

HEAVY = ("torch._inductor", "torch._dynamo", "torch.onnx")
"""Parts of torch that importing it does not bring, each with a second or more of its own."""


def loaded_by(*arguments):
    """Names of all modules that a Python imports for this, whatever becomes of them later."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return modules_in(done.stderr)


def modules_in(log):
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", log, re.MULTILINE))


def packages(modules):
    """Distributed packages among them: not Python's own, nor those of the interpreter's start, nor
    what was searched for and not found."""
    names = {module.partition(".")[0] for module in modules}
    names -= sys.stdlib_module_names | OF_THE_INTERPRETER
    names = {name for name in names if not name.startswith("__editable__")}
    return {name for name in names if importlib.util.find_spec(name) is not None}


def test_a_client_loads_nothing_before_a_name_is_used():
    assert packages(loaded_by("-c", "import frontend")) == {"frontend"}


def test_a_client_that_can_start_an_engine_loads_no_more_than_messages_need():
    loaded = packages(loaded_by("-c", "from frontend import LLM, AsyncLLM, SamplingParams"))
    assert loaded <= {"frontend", "protocol"} | OF_MESSAGES


def test_client_commands_load_no_terminal_library_before_they_need_it():
    code = "import frontend.cli.app, frontend.cli.chat, frontend.cli.engine_watch, frontend.llm"
    assert not packages(loaded_by("-c", code)) & {"textual", "prompt_toolkit", *OF_HELP}


def test_help_loads_options_and_nothing_of_the_engine():
    loaded = loaded_by("-m", "engine_core.cli", "--help")
    assert packages(loaded) <= {"engine_core", "protocol", "msgspec"} | OF_OPTIONS | OF_HELP
    assert {"engine_core.options.engine", "engine_core.errors"} <= loaded
    assert "engine_core.daemon" not in loaded


def test_opening_a_model_and_its_tokenizer_needs_no_torch():
    assert packages(
        loaded_by("-c", "import engine_core.startup.before_torch, engine_core.model_files")
    ) <= ({"engine_core", "protocol", "msgspec"} | OF_OPTIONS | OF_MODEL_FILES)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Modules of a daemon on a CPU: when it was ready, and when it had served some requests."""
    file = tmp_path_factory.mktemp("shape") / "tiny.json"
    file.write_text(json.dumps(CONFIG))
    options = ["--load-format", "dummy", "--model-config", file, "--num-blocks", 40]
    program = ("-X", "importtime", "-m", "engine_core.cli")
    with running_daemon(None, *options, "--device", "cpu", program=program) as daemon:
        at_ready = modules_in(daemon.log())
        with RawClient(daemon.address) as client:
            assert len(client.complete([5, 6, 7], max_tokens=8)[0]) == 8
            sampled = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "logprobs": 2}
            assert len(client.complete([5, 6], request_id="s", max_tokens=8, **sampled)[0]) == 8
        at_end = modules_in(daemon.log())
        assert daemon.stop() == 0
        return at_ready, at_end


def test_a_ready_daemon_on_a_cpu_has_loaded_these_packages_and_no_others(served):
    ours = {"engine_core", "kernels", "protocol"}
    loaded = packages(served[0])
    assert loaded <= ours | OF_OPTIONS | OF_MESSAGES | OF_MODEL_FILES | OF_TORCH
    assert ours | {"torch", "zmq", "msgspec"} <= loaded


@pytest.mark.parametrize("package", HEAVY)
def test_a_daemon_loads_no_compiler_and_no_exporter_of_torch(served, package):
    assert not {name for name in served[1] if f"{name}.".startswith(f"{package}.")}


def test_the_first_requests_load_nothing_that_they_would_wait_for(served):
    at_ready, at_end = served
    assert at_end - at_ready == set()
