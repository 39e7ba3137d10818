"""GET /metrics: what Prometheus' own parser reads of it, from requests and from the engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from fake_model import statistics
from http_server import serving
from prometheus_client.parser import text_string_to_metric_families

from frontend.http.metrics import engine_metrics
from frontend.http.metrics.engine_metrics import ENGINE_METRICS, VLLM_ONLY
from protocol.calls import EngineState, EngineStatistics

BODY = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}


def scrape(url):
    """Samples by name and labels; a histogram's `le` among them."""
    response = httpx.get(url + "/metrics", timeout=20)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def named(samples, name):
    """The values of one name, without labels."""
    return [value for (each, *_), value in samples.items() if each == name]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_in_each_histogram_once_and_its_tokens_as_often_as_they_came(
    http, url, stream
):
    http.post("/v1/completions", json={**BODY, "stream": stream})
    samples = scrape(url)
    counts = {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 4,
        "request_time_per_output_token_seconds": 1,
        "e2e_request_latency_seconds": 1,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 1,
        "request_decode_time_seconds": 1,
        "request_params_n": 1,
    }
    for name, count in counts.items():
        assert named(samples, f"engine_core_{name}_count") == [count], name
    assert named(samples, "engine_core_request_generation_tokens_sum") == [5]
    assert named(samples, "engine_core_request_prompt_tokens_sum") == [len("Hello")]
    assert named(samples, "engine_core_request_params_max_tokens_sum") == [5]
    gaps = named(samples, "engine_core_inter_token_latency_seconds_sum")[0]
    latency = named(samples, "engine_core_e2e_request_latency_seconds_sum")[0]
    first = named(samples, "engine_core_time_to_first_token_seconds_sum")[0]
    assert first + gaps <= latency


def test_buckets_count_up_to_their_bound(http, url):
    for num_tokens in (1, 2, 2, 5):
        http.post("/v1/completions", json={**BODY, "max_tokens": num_tokens})
    buckets = {
        dict(labels)["le"]: value
        for (name, *labels), value in scrape(url).items()
        if name == "engine_core_request_generation_tokens_bucket"
    }
    assert [buckets[le] for le in ("1.0", "2.0", "5.0", "10.0", "+Inf")] == [1, 3, 4, 4, 4]


def test_samples_of_a_request_count_one_by_one(http, url):
    http.post("/v1/completions", json={**BODY, "n": 3, "temperature": 1, "seed": 1})
    samples = scrape(url)
    assert named(samples, "engine_core_inter_token_latency_seconds_count") == [3 * 4]
    assert named(samples, "engine_core_request_generation_tokens_sum") == [15]
    assert named(samples, "engine_core_request_params_n_sum") == [3]


def test_engine_metrics_are_equal_from_every_server_but_for_the_name_that_it_serves(engine):
    """So they can be joined with its metrics of requests."""
    with serving(engine.address) as one, serving(engine.address, "other-name") as other:
        httpx.post(one + "/v1/completions", json=BODY).raise_for_status()
        found = [
            {
                tuple(part for part in key if part != ("served_model_name", name)): value
                for key, value in scrape(url).items()
                if ("engine", engine.engine_id) in key
            }
            for url, name in ((one, "fake"), (other, "other-name"))
        ]
        assert found[0] == found[1]
        assert ("engine_core_num_requests_running", ("engine", engine.engine_id)) in {
            (name, labels[0]) for name, *labels in found[0]
        }
        ours = named(scrape(other), "engine_core_time_to_first_token_seconds_count")
        assert ours == [0], "requests are those of this server"


def test_every_counter_of_the_engine_has_a_metric(monkeypatch):
    """Raising any field changes a metric, except those named here."""
    monkeypatch.setattr(engine_metrics.time, "time", lambda: 1.0)  # one metric's value
    elsewhere = {"num_steps_by_tokens", "num_running_by_adapter", "num_waiting_by_adapter", "state"}
    """In a histogram, by name only, and no number."""
    not_served = {"num_slots_wasted", "num_preemptions_forced", "service_by_tenant", "num_steps"}
    document = dict.fromkeys(EngineStatistics.__struct_fields__, 1)
    for name in EngineStatistics.__annotations__:
        if EngineStatistics.__annotations__[name] in (dict[str, int], dict[str, float]):
            document[name] = {"stop": 1}
    document |= {"num_blocks": 100, "num_host_blocks": 100, "state": EngineState.RUNNING}

    def values(**changed):
        numbers = EngineStatistics(**{**document, **changed})
        return [list(metric.samples(numbers)) for metric in (*ENGINE_METRICS, *VLLM_ONLY)]

    raised = {
        name: {"stop": 2} if isinstance(value, dict) else value + 1
        for name, value in document.items()
        if name not in elsewhere | not_served
    }
    missing = [name for name, value in raised.items() if values(**{name: value}) == values()]
    assert not missing


def test_drafts_are_counted_by_what_made_them():
    numbers = statistics(0)
    numbers = msgspec.structs.replace(
        numbers,
        num_draft_tokens_by_method={"ngram": 9, "grammar": 4},
        num_accepted_tokens_by_method={"ngram": 2, "grammar": 4},
    )
    (metric,) = (each for each in ENGINE_METRICS if each.name == "spec_decode_draft_tokens")
    assert metric.labels == ("method", "result")
    assert dict(metric.samples(numbers)) == {
        ("ngram", "accepted"): 2,
        ("ngram", "rejected"): 7,
        ("grammar", "accepted"): 4,
        ("grammar", "rejected"): 0,
    }


def test_an_engine_that_is_away_leaves_what_this_server_saw(start_engine):
    engine = start_engine()
    with serving(engine.address, "name") as url:
        httpx.post(url + "/v1/completions", json=BODY).raise_for_status()
        assert named(scrape(url), "engine_core_up") == [1]
        engine.stop()
        samples = scrape(url)
        assert named(samples, "engine_core_up") == [0]
        assert named(samples, "engine_core_time_to_first_token_seconds_count") == [1]
        assert not named(samples, "engine_core_num_requests_running")


def test_scrapes_at_once_share_one_call_to_the_engine(engine, url):
    scrape(url)
    before = engine.num_statistics
    engine.mute = True
    with ThreadPoolExecutor() as pool:
        list(pool.map(scrape, [url] * 5))
    engine.mute = False
    assert engine.num_statistics - before <= 1


VLLM_DASHBOARD = (
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
)


def test_with_vllms_names_its_dashboard_finds_everything(start_engine):
    engine = start_engine()
    with serving(engine.address, "served", metrics_names="vllm") as url:
        httpx.post(url + "/v1/completions", json=BODY).raise_for_status()
        samples = scrape(url)
        for name in VLLM_DASHBOARD:
            found = [dict(labels) for each, *labels in samples if each == name]
            assert found, name
            assert all(labels["model_name"] == "served" for labels in found)
        reasons = {
            dict(labels)["finished_reason"]
            for each, *labels in samples
            if each == "vllm:request_success_total"
        }
        assert "length" in reasons


@pytest.mark.parametrize(("names", "prefix"), [("engine-core", "engine_core_"), ("vllm", "vllm:")])
def test_adapters_of_unfinished_requests_are_labels_as_vllms(engine, monkeypatch, names, prefix):
    def of_adapters(_call):
        return msgspec.structs.replace(
            statistics(0),
            max_loras=4,
            num_running_by_adapter={"sql": 2, "poet": 1},
            num_waiting_by_adapter={"sql": 7},
        )

    with serving(engine.address, "small", metrics_names=names) as url:
        assert named(scrape(url), f"{prefix}lora_requests_info") == []  # it serves none
        monkeypatch.setattr(engine, "do", of_adapters)
        (found,) = (
            (dict(labels), value)
            for (name, *labels), value in scrape(url).items()
            if name == f"{prefix}lora_requests_info"
        )
    labels, value = found
    assert {key: labels[key] for key in labels if "lora" in key} == {
        "max_lora": "4",
        "running_lora_adapters": "poet,sql",
        "waiting_lora_adapters": "sql",
    }
    assert labels["engine"] == engine.engine_id
    assert abs(value - time.time()) < 60
