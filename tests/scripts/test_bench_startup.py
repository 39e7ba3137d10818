"""The start-up benchmark on a tiny model and a made-up server: what it tells, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_startup

SCRIPT = Path(bench_startup.__file__)
SERVER = """
import http.server, json, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "made-up"}]}).encode(), "application/json")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"text": "a", "finish_reason": "length"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 32, "completion_tokens": 1}}
        lines = [json.dumps(event), json.dumps(usage), "[DONE]"]
        self._send("".join(f"data: {line}\\n\\n" for line in lines).encode(), "text/event-stream")
    def _send(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ).save_pretrained(folder)
    return folder


def bench(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_the_last_line_has_medians_of_the_engine_and_of_the_server(tiny_llama, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    server = f"other={sys.executable} {tmp_path / 'server.py'} {{port}}"
    done = bench(
        *("--model", tiny_llama, "--repeat", 1, "--options", "--num-blocks 16"),
        *("--server", server, "--json", tmp_path / "figures.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == result
    ours, other = result["median"]["engine-core"], result["median"]["other"]
    assert 0 < ours["launch_to_ready_s"] < ours["launch_to_first_token_s"]
    assert ours["cpu_to_ready_s"] > 0
    phases_s = sum(value for name, value in ours.items() if name.startswith("phase_"))
    assert 0.5 * ours["launch_to_ready_s"] < phases_s <= ours["launch_to_ready_s"] + 0.01
    assert ours["peak_memory_bytes"] > 50e6
    assert 0 < other["launch_to_ready_s"] < other["launch_to_first_token_s"]


def test_a_server_that_does_not_start_is_reported_and_has_no_figures(tiny_llama):
    done = bench(
        *("--model", tiny_llama, "--repeat", 1, "--options", "--num-blocks 16"),
        *("--server", f"other={sys.executable} -c raise.SystemExit(3) {{port}}"),
    )
    assert done.returncode == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert "other" in result["failed"]
    assert "other" not in result["median"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--repeat", "0"], "--repeat is 0, it must be 1 or more"),
        (["--server", "other=run --port 1"], "does not say where its port goes"),
        (["--server", "engine-core=run {port}"], "two are called alike"),
    ],
)
def test_what_means_nothing_is_refused_with_exit_code_2(capsys, words, complaint):
    with pytest.raises(SystemExit) as ended:
        bench_startup.parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_median_is_taken_of_figures_that_every_run_has():
    runs = [{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0, "b": 6.0}]
    assert bench_startup.median_of(runs) == {"a": 2.0}
