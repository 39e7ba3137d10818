"""A daemon with random weights of a config.json: token ids in, token ids out."""

import json

import pytest
from daemons import run_to_exit, running_daemon
from raw_client import RawClient

from engine_core.errors import ExitCode
from protocol.outputs import FinishReason

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "eos_token_id": 96, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("shape") / "tiny.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_it_serves_token_ids_and_stops_cleanly(config_file, dtype):
    options = ["--load-format", "dummy", "--model-config", config_file, "--num-blocks", 40]
    with running_daemon(None, *options, "--dtype", dtype) as daemon:
        assert daemon.ready["model"] == "tiny"
        with RawClient(daemon.address) as client:
            assert client.welcome.model.tokenizer is None
            assert client.welcome.model.dtype == ("float32" if dtype == "auto" else dtype)
            tokens, end = client.complete([5, 6, 7], max_tokens=12)
            assert (len(tokens), end.finish_reason) == (12, FinishReason.LENGTH)
            assert client.complete([5, 6, 7], request_id="again", max_tokens=12)[0] == tokens
            assert client.statistics().num_compilations_after_ready == 0
        assert daemon.stop() == 0
        log = daemon.log()
        assert "the weights of tiny are random" in log
        assert "clients must send token ids" in log
        assert '"load_format": "dummy"' in log


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model is missing"),
        (["--load-format", "dummy"], "name a config.json with --model-config"),
        (
            ["--load-format", "dummy", "--model-config", "/no/such.json"],
            "/no/such.json is not a file",
        ),
        (["--model", "m", "--device", "cpu", "--kv-cache-dtype", "fp8"], "needs a GPU"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options, words):
    done = run_to_exit(*options)
    assert done.returncode in (ExitCode.WRONG_OPTIONS, ExitCode.START_FAILED)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda"], "sees no CUDA device"),
        (["--batch-invariant", "--dtype", "float16"], "has products that torch computes"),
        (["--quantization", "int8", "--dtype", "bfloat16"], "computes in float32, not in bfloat16"),
        (["--quantization", "int4", "--device", "cuda"], "int4 runs on a CPU only"),
        (
            ["--weight-cache-size", "1GiB", "--device", "cuda"],
            "--weight-cache-size has no effect on a GPU",
        ),
        (["--capture-at-start"], "--capture-at-start has no effect on a CPU"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 needs a GPU"),
        (["--model-impl", "transformers"], "no effect with --load-format dummy"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(config_file, monkeypatch, options, words):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_to_exit("--load-format", "dummy", "--model-config", config_file, *options)
    assert done.returncode in (ExitCode.WRONG_OPTIONS, ExitCode.START_FAILED)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
