"""What docs/deployment has for Kubernetes and Compose: the tools of each read it, it fits the
image, and wrong values are refused."""

import json
import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

from frontend.cli.app import app as client_app

DEPLOYMENT = Path(__file__).parents[1] / "docs" / "deployment"
CHART = DEPLOYMENT / "helm" / "engine-core"
UID = 10001


def needs_tools(test):
    """Of the extra `deployment`."""
    return pytest.mark.slow(pytest.mark.packages(test))


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def rendered(*values, release="chat"):
    """By kind and name."""
    options = [part for value in values for part in ("--set", value)]
    done = run("helm", "template", release, CHART, *options)
    assert done.returncode == 0, done.stderr
    return {
        (it["kind"], it["metadata"]["name"]): it for it in yaml.safe_load_all(done.stdout) if it
    }


def documents(name):
    return list(yaml.safe_load_all((DEPLOYMENT / name).read_text()))


def server_options(arguments):
    """What `engine-core serve --host 0.0.0.0 ARGUMENTS`, the image's entry point, is told."""
    arguments = ["serve", "--host", "0.0.0.0", *arguments]
    _, bound, _ = client_app.parse_args(arguments, exit_on_error=False, print_error=False)
    settings = bound.arguments["settings"]
    settings.check()
    return settings, bound.arguments.get("engine_options", ())


ALL = ("monitoring.enabled=true", "monitoring.keySecret=m", "autoscaling.enabled=true",
       "networkPolicy.enabled=true", "gpus=2", "servedModelName=chat", "podLabels.team=a",
       "args={--max-model-len,8192}", "nodeSelector.kind=gpu", "ingress.enabled=true",
       "ingress.host=chat.example.org", "ingress.tlsSecret=tls", "extraVolumes[0].name=models",
       "extraVolumes[0].nfs.server=a", "extraVolumes[0].nfs.path=/b",
       "extraVolumeMounts[0].name=models", "extraVolumeMounts[0].mountPath=/models",
       "env[0].name=HF_TOKEN", "env[0].value=t")  # fmt: skip


@needs_tools
@pytest.mark.parametrize(
    "values",
    [
        ("keys.secret=k",),
        ("keys.insecure=true", "persistence.enabled=false"),
        ("keys.secret=k", *ALL),
        ("keys.secret=k", "persistence.existingClaim=models", "runtimeClassName=nvidia"),
    ],
    ids=["keys", "insecure", "all", "a claim that is there"],
)
def test_helm_and_the_schemas_of_kubernetes_take_the_chart(values, tmp_path):
    options = [part for value in values for part in ("--set", value)]
    lint = run("helm", "lint", "--strict", CHART, *options)
    assert lint.returncode == 0, lint.stdout
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(rendered(*values).values()))
    for version in ("1.27", "1.34"):
        done = run("kubernetes-validate", "--strict", "-k", version, file)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_tools
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((), "clients need keys: --set keys.secret"),
        (("keys.secret=k", "keys.insecure=true"), "exclude each other"),
        (("keys.secret=k", "monitoring.enabled=true"), "monitoring.keySecret"),
        (("keys.secret=k", "modle=x"), "modle"),
        (("keys.secret=k", "replicas=-1"), "replicas"),
        (("keys.secret=k", "model="), "model"),
        (("keys.secret=k", "gpus=-1"), "gpus"),
        (("keys.secret=k", "args={--port,9000}"), "port 8000"),
        (("keys.secret=k", "args={--ssl-certfile=a.pem}"), "end TLS"),
        (("keys.secret=k", "ingress.enabled=true"), "ingress.host"),
        (("keys.secret=k", "env[0].name=A", "env[0].value=1"), "Expected: string"),
        (("keys.secret=k", r"podLabels.app\.kubernetes\.io/name=x"), "podLabels"),
    ],
)
def test_values_that_cannot_serve_are_refused_with_what_to_do(values, words):
    options = [part for value in values for part in ("--set", value)]
    done = run("helm", "template", "chat", CHART, *options)
    assert done.returncode != 0
    assert words in done.stderr


@needs_tools
@pytest.mark.parametrize("drain", [1, 60, 300])
def test_a_pod_of_the_chart_is_a_server_that_ends_in_its_time(drain, tmp_path):
    keys = tmp_path / "api-keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "k"\n')
    keys.chmod(0o600)
    found = rendered("keys.secret=k", f"drainSeconds={drain}", *ALL)
    pod = found["StatefulSet", "chat-engine-core"]["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    (mount,) = [it for it in engine["volumeMounts"] if it["name"] == "keys"]
    place = f"{mount['mountPath']}/api-keys.toml"
    assert place in engine["args"]
    arguments = [str(keys) if part == place else part for part in engine["args"]]
    settings, engine_options = server_options(arguments)
    assert settings.drain_timeout == drain
    assert tuple(engine_options) == ("--max-model-len", "8192")
    wait = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + wait + 10
    assert engine["ports"][0]["containerPort"] == settings.port
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["timeoutSeconds"] > settings.health_timeout
        assert engine[probe]["httpGet"]["path"] in ("/ready", "/health")


@needs_tools
def test_numbers_of_a_values_file_are_what_they_were(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text('keys: {secret: k}\nargs: ["--max-model-len", 1048576, "--slo-tpot-ms", 0.5]\n')
    done = run("helm", "template", "chat", CHART, "--values", file)
    (pods,) = [it for it in yaml.safe_load_all(done.stdout) if it["kind"] == "StatefulSet"]
    arguments = pods["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[-4:] == ["--max-model-len", "1048576", "--slo-tpot-ms", "0.5"]


@needs_tools
@pytest.mark.parametrize("cpu", [None, 8])
def test_threads_follow_the_limit_of_a_pod_else_its_request(cpu):
    limit = () if cpu is None else (f"resources.limits.cpu={cpu}",)
    found = rendered("keys.secret=k", *limit)["StatefulSet", "chat-engine-core"]
    (engine,) = found["spec"]["template"]["spec"]["containers"]
    threads = {"resourceFieldRef": {"resource": "requests.cpu"}}
    expected = [{"name": "OMP_NUM_THREADS", "valueFrom": threads}] if cpu is None else []
    assert engine.get("env", []) == expected


@needs_tools
def test_selectors_find_the_pods_and_the_scaled_set_has_no_number_of_its_own():
    found = rendered("keys.secret=k", *ALL)
    labels = found["StatefulSet", "chat-engine-core"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["StatefulSet", "chat-engine-core"]["spec"]["selector"]["matchLabels"],
        found["Service", "chat-engine-core"]["spec"]["selector"],
        found["Service", "chat-engine-core-pods"]["spec"]["selector"],
        found["PodDisruptionBudget", "chat-engine-core"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy", "chat-engine-core"]["spec"]["podSelector"]["matchLabels"],
        documents("gateway/inference-pool.yaml")[0]["spec"]["selector"]["matchLabels"],
    ]
    for selector, (name, value) in product(selectors, selectors[0].items()):
        assert selector[name] == value == labels[name]
    assert labels["team"] == "a"
    assert "replicas" not in found["StatefulSet", "chat-engine-core"]["spec"]
    assert rendered("keys.secret=k")["StatefulSet", "chat-engine-core"]["spec"]["replicas"] == 1
    metric = found["HorizontalPodAutoscaler", "chat-engine-core"]["spec"]["metrics"][0]["pods"]
    adapter = (DEPLOYMENT / "helm" / "prometheus-adapter.yaml").read_text()
    assert metric["metric"]["name"] in adapter


def test_the_runtime_of_kserve_is_a_server_of_the_folder_that_kserve_fills():
    pod = documents("kserve/serving-runtime.yaml")[0]["spec"]
    (container,) = pod["containers"]
    arguments = [argument.replace("{{.Name}}", "chat") for argument in container["args"]]
    assert arguments[0] == "/mnt/models"
    settings, engine_options = server_options(arguments)
    assert engine_options == ()
    assert container["ports"][0]["containerPort"] == settings.port
    service = documents("kserve/serving-runtime.yaml")[1]["spec"]["predictor"]
    assert service["terminationGracePeriodSeconds"] > settings.drain_timeout + 15
    assert service["model"]["modelFormat"]["name"] in {
        it["name"] for it in pod["supportedModelFormats"]
    }


def test_pods_of_either_kind_have_the_same_rights_and_places_to_write():
    runtime = documents("kserve/serving-runtime.yaml")[0]["spec"]
    (container,) = runtime["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["runAsUser"] == UID
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/cache", "/tmp", "/dev/shm"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in runtime["volumes"]
    }
    chart = (CHART / "templates" / "statefulset.yaml").read_text()
    assert all(f"mountPath: {place}}}" in chart for place in mounts)
    assert f"runAsUser: {UID}" in chart
    assert f"--uid {UID}" in (DEPLOYMENT / "Containerfile").read_text()


def test_compose_serves_with_a_key_and_stops_in_its_time(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    (compose,) = documents("compose/compose.yaml")
    engine = compose["services"]["engine"]
    command = [part.replace("${MODEL:-smollm2-135m-instruct}", "m") for part in engine["command"]]
    settings, _ = server_options(command)
    assert int(engine["stop_grace_period"].removesuffix("s")) > settings.drain_timeout + 10
    assert engine["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert "VLLM_API_KEY" in engine["environment"]
    for service in compose["services"].values():
        for source in [volume.split(":")[0] for volume in service.get("volumes", ())]:
            if source.startswith("."):
                assert (DEPLOYMENT / "compose" / source).is_file(), source
            else:
                assert source in compose["volumes"]
    (scrape,) = documents("compose/prometheus.yml")[0]["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"engine:{settings.port}"]}]
    assert scrape["authorization"]["credentials_file"] in json.dumps(compose)
    assert scrape["job_name"] in (DEPLOYMENT.parent / "monitoring" / "alerts.yml").read_text()


@needs_tools
def test_the_schema_of_compose_takes_the_files():
    files = [DEPLOYMENT / "compose" / name for name in ("compose.yaml", "gpu.yaml")]
    done = run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    assert done.returncode == 0, done.stdout


@needs_tools
def test_hadolint_finds_nothing_in_the_container_file():
    # DL3008, DL3013: versions stand in constraints.txt, and Debian's packages follow the base image
    done = run("hadolint", "--ignore", "DL3008", "--ignore", "DL3013", DEPLOYMENT / "Containerfile")
    assert done.returncode == 0, done.stdout
