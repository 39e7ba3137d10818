"""The deployment file: what it says, what is refused, and how."""

import pytest

from engine_core.errors import ConfigurationError
from frontend.cluster import deployment as module
from frontend.cluster.deployment import read_deployment

SMALL = '[[models]]\nmodel = "smollm2-135m-instruct"\n'


@pytest.fixture(autouse=True)
def unchecked_options(request, monkeypatch):
    """The daemon's own check takes half a second: it runs where a test is about it."""
    if "options" not in request.node.name:
        monkeypatch.setattr(module, "_check_options", lambda model: None)


@pytest.fixture
def read(tmp_path):
    def read(text):
        file = tmp_path / "deployment.toml"
        file.write_text(text)
        return read_deployment(file)

    return read


def test_a_model_alone_has_one_replica_of_one_core(read):
    deployment = read(SMALL)
    (model,) = deployment.models
    assert (model.served_name, model.min_replicas, model.most_replicas) == (
        "smollm2-135m-instruct", 1, 1,
    )  # fmt: skip
    assert model.resources == {"CPU": 1}
    assert model.num_ranks == 1
    assert "--num-threads=1" in model.daemon_arguments()
    assert (deployment.server.host, deployment.server.port) == ("127.0.0.1", 8000)


def test_names_have_dashes_or_underscores(read):
    deployment = read("""
        [http]
        port = 9000
        cors-origin = ["https://chat.example"]
        reconnect_timeout_s = 30
        [[models]]
        model = "smollm2-135m-instruct"
        name = "small"
        max-replicas = 3
        resources = {CPU = 2, "my-label" = 1}
        options = {max-num-seqs = 8, kv_cache_memory = "1GiB", enable-prefix-caching = false}
        autoscaling = {target-ongoing-requests = 4}
    """)
    (model,) = deployment.models
    assert deployment.server.cors_origin == ("https://chat.example",)
    assert deployment.http.reconnect_timeout_s == 30
    assert model.resources == {"CPU": 2, "my-label": 1}
    assert model.autoscaling.target_ongoing_requests == 4
    assert model.daemon_arguments() == [
        "--model", "smollm2-135m-instruct", "--model-name=small", "--max-num-seqs=8",
        "--kv-cache-memory=1GiB", "--no-enable-prefix-caching", "--num-threads=2",
    ]  # fmt: skip


def test_a_folder_of_another_node_and_its_options_are_taken(read):
    (model,) = read(SMALL.replace("smollm2-135m-instruct", "/only/there")).models
    assert model.daemon_arguments()[:2] == ["--model", "/only/there"]


@pytest.mark.parametrize(
    ("resources", "options", "expected"),
    [
        ('{CPU = 4, GPU = 1}', "{}", None),
        ("{CPU = 0.5}", "{}", None),
        ("{label = 1}", "{}", None),
        ("{CPU = 4}", "{num_threads = 3}", 3),
    ],
)  # fmt: skip
def test_threads_follow_the_cores_of_a_replica_without_a_gpu(read, resources, options, expected):
    (model,) = read(f"{SMALL}resources = {resources}\noptions = {options}").models
    given = [each for each in model.daemon_arguments() if each.startswith("--num-threads")]
    assert given == ([] if expected is None else [f"--num-threads={expected}"])


@pytest.mark.parametrize(
    ("model", "name"),
    [("./models/tiny-1.gguf", "tiny-1"), ("/models/Org-7B/", "Org-7B"), ("org/7B", "org/7B")],
)
def test_a_path_is_served_under_its_last_part(read, model, name):
    assert read(f'[[models]]\nmodel = "{model}"').models[0].served_name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "length >= 1 - at `$.models`"),
        ("models = 3", "see docs/guides/cluster.md"),
        ("[[models]]\nname = 'x'", "missing required field `model`"),
        ("[[models]]\nmodel = 'x'\nreplicas = 2", "unknown field `replicas`"),
        (f"{SMALL}min_replicas = -1", ">= 0 - at `$.models[0].min_replicas`"),
        (f"{SMALL}max_replicas = 0", ">= 1 - at `$.models[0].max_replicas`"),
        (f"{SMALL}min_replicas = 3\nmax_replicas = 2", "it must be at least min_replicas, 3"),
        (SMALL + SMALL, "two models have the name 'smollm2-135m-instruct'"),
        (f"{SMALL}name = 'a b'", "needs a `name`"),
        (f"{SMALL}resources = {{CPU = 0}}", "> 0.0"),
        (f"{SMALL}options = {{bind = 'tcp://*:1'}}", "listens on a port of its node"),
        (f"{SMALL}options = {{supervise = true}}", "Ray starts a replica again"),
        (f"{SMALL}options = {{max_num_sequences = 4}}", "--max-num-sequences"),
        (f"{SMALL}options = {{max_num_seqs = -4}}", "max_num_seqs"),
        (f"{SMALL}autoscaling = {{target_slo_attainment = 1.5}}", "<= 1.0"),
        (f"[http]\nuds = '/x'\n{SMALL}", "[http] has no uds: Ray Serve's proxies"),
        (f"[http]\nrequest-timeout = 3\n{SMALL}", "[http] has no request_timeout"),
        (f"[http]\nspeed = 3\n{SMALL}", "[http] has no 'speed'; it takes"),
        (f"[http]\nport = 'x'\n{SMALL}", "Expected `int`, got `str` - at `$.port`"),
        (f"[http]\nport = 0\n{SMALL}", "port 0"),
        ("[[models]", "deployment.toml"),
    ],
)  # fmt: skip
def test_what_cannot_be_deployed_is_named(read, text, said):
    with pytest.raises(ConfigurationError) as error:
        read(text)
    assert said in str(error.value)
    assert "deployment.toml" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file or directory; check the path"):
        read_deployment(tmp_path / "x.toml")


def test_workers_of_a_replica_are_told_of_its_sizes_and_those_that_join_of_their_own(read):
    text = f"{SMALL}tensor_parallel_size = 3\nresources = {{CPU = 2}}\n"
    (model,) = read(f"{text}options = {{max_num_seqs = 8, log_format = 'json'}}").models
    assert model.num_ranks == 3
    assert model.daemon_arguments()[-2:] == [
        "--tensor-parallel-size=3", "--pipeline-parallel-size=1",
    ]  # fmt: skip
    assert model.worker_arguments() == ["--log-format=json", "--num-threads=2"]
