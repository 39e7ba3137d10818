"""Which torch `make install` takes, whatever the pip of the machine is told."""

import http.server
import threading

import pytest

from engine_core import installation
from scripts import install


def test_a_machine_without_a_gpu_takes_the_index_of_cpu_builds_where_it_answers():
    found = install.torch_arguments(has_gpu=False, index_answers=True)
    assert found == ["torch==2.13.0", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert install.torch_arguments(has_gpu=False, index_answers=False) == ["torch==2.13.0"]


def test_the_script_and_the_program_name_the_same_index():
    assert install.CPU_INDEX == installation.CPU_INDEX


def test_a_machine_with_a_gpu_takes_the_plain_build():
    assert install.torch_arguments(has_gpu=True, index_answers=True) == ["torch>=2.11"]


def test_a_build_for_cuda_without_a_gpu_is_said_with_what_to_do():
    said = install.complaint(has_gpu=False, cuda="13.0")
    assert "no NVIDIA GPU" in said
    assert "pip uninstall -y torch" in said
    assert "--index-url https://download.pytorch.org/whl/cpu" in said
    assert install.complaint(has_gpu=False, cuda="") is None
    assert install.complaint(has_gpu=True, cuda="13.0") is None


@pytest.mark.slow
def test_the_index_is_asked_as_pip_would_and_its_other_sources_do_not_count(tmp_path, monkeypatch):
    wheel = "torch-2.13.0+cpu-py3-none-any.whl"
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="{wheel}">{wheel}</a>'.encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert install.has_cpu_builds(f"{url}/cpu")
        assert not install.has_cpu_builds(f"{url}/other")
        server.shutdown()


def test_what_it_does_not_know_is_wrong_usage(capsys):
    assert install.main(["tensors"]) == 2
    assert "install.py torch" in capsys.readouterr().err
