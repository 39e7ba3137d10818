"""What clients are told of the cache, and when."""

from types import SimpleNamespace

import pytest

from engine_core.kv_cache import KVCacheManager
from engine_core.observers.cache_publisher import CachePublisher
from engine_core.server.clients import Client, Rights
from protocol.cache_events import BlockNaming, load_of
from protocol.calls import WatchCache
from protocol.outputs import EngineCoreOutputs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams


class Told:
    """A publisher over a cache of 8 blocks of 16, and what it sent."""

    def __init__(self, *, isolates_tenants=False):
        self.cache = KVCacheManager(num_blocks=8, block_size=16)
        self.sent, self.is_full = [], False
        self.publisher = CachePublisher(self.cache, self._send, isolates_tenants=isolates_tenants)

    def watch(self, client):
        self.publisher.watch(client, WatchCache(), None)

    def _send(self, client, message):
        if not self.is_full:
            self.sent.append((client.index, message))
        return not self.is_full

    def arrive(self, name, client_index, num_tokens=100):
        params = SamplingParams(max_tokens=1)
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1] * num_tokens, sampling_params=params
        )
        self.publisher.on_arrival(request, client_index, 0.0)

    def step(self, *finished, client_index=0):
        outputs = EngineCoreOutputs(other_outputs=[], finished_req_ids=list(finished))
        self.publisher.on_outputs({client_index: outputs}, 0.0)
        sent, self.sent = self.sent, []
        return sent

    def store(self, *hashes):
        pool = self.cache._pool
        for block_id, block_hash in zip(pool.allocate(len(hashes)), hashes, strict=True):
            pool.register(block_id, 0, block_hash)
            pool.release([block_id])


def client(index, rights=Rights()):  # noqa: B008
    return Client(index, b"%d" % index, "test", rights, nonce=f"nonce{index}")


def key(number):
    return number.to_bytes(8, "little") + bytes(56)


@pytest.fixture
def told():
    return Told()


def test_nothing_is_noted_or_sent_while_nobody_watches(told):
    told.store(key(1))
    assert told.step() == []
    assert told.cache._pool.touched is None
    told.watch(client(0))
    told.publisher.on_departure(client(0))
    assert told.cache._pool.touched is not None, "another one with its index"


def test_all_comes_first_then_what_changes_once_a_step_and_nothing_without_a_change(told):
    told.store(key(1), key(2))
    watcher = client(0)
    told.watch(watcher)
    ((_, first),) = told.step()
    assert first.naming == BlockNaming(block_size=16)
    assert (first.number, first.stored) == (0, key(1)[:8] + key(2)[:8])
    assert told.step() == []
    told.store(key(3))
    told.store(key(4))
    ((_, second),) = told.step()
    assert (second.number, second.naming, second.removed) == (1, None, b"")
    assert set(memoryview(second.stored).cast("Q")) == {3, 4}
    told.cache._pool.allocate(5)  # the fifth is a cached one
    ((_, third),) = told.step()
    assert (third.number, third.stored, third.removed) == (2, b"", key(1)[:8])
    told.publisher.on_departure(watcher)
    told.store(key(9))
    assert told.step() == []


def test_all_cleared_is_told_as_all_that_is_left(told):
    told.store(key(1), key(2), key(3))
    told.watch(client(0))
    told.step()
    told.cache.reset_prefix_cache()
    ((_, events),) = told.step()
    assert (events.naming, events.stored) == (BlockNaming(block_size=16), b"")


def test_who_could_not_be_told_is_told_all(told):
    told.watch(client(0))
    told.step()
    told.store(key(1))
    told.is_full = True
    assert told.step() == []
    told.is_full = False
    ((_, events),) = told.step()
    assert (events.number, events.stored) == (2, key(1)[:8])
    assert events.naming is not None


def test_other_weights_are_another_naming(told):
    told.watch(client(0))
    told.step()
    told.cache.use_weights("new", [])
    ((_, events),) = told.step()
    assert events.naming == BlockNaming(block_size=16, weights="new")


def test_a_client_learns_its_own_nonce_and_tenant_alone():
    told = Told(isolates_tenants=True)
    told.watch(client(0, Rights("ann")))
    told.watch(client(1))
    names = {index: events.naming for index, events in told.step()}
    assert names == {
        0: BlockNaming(block_size=16, nonce="nonce0", tenant="ann"),
        1: BlockNaming(block_size=16, nonce="nonce1"),
    }


def test_each_client_is_told_the_load_of_the_others(told):
    for index in (0, 1):
        told.watch(client(index))
    assert [events.others_load for _, events in told.step()] == [0, 0]
    told.arrive("a", 0)
    told.arrive("b", 2, 50)
    assert dict(told.step())[0].others_load == load_of(50)
    told.arrive("c", 0, 10)
    ((index, events),) = told.step()
    assert (index, events.others_load) == (1, load_of(100) + load_of(50) + load_of(10))
    new = SimpleNamespace(req_id="a", num_computed_tokens=96, prompt_token_ids=[1] * 100)
    told.publisher.on_plan(SimpleNamespace(scheduled_new_reqs=[new]), 0.0)
    ((index, events),) = told.step()
    assert (index, events.others_load) == (1, load_of(4) + load_of(50) + load_of(10))
    told.step("b", client_index=2)
    ((index, events),) = told.step("a", "c")
    assert (index, events.others_load) == (1, 0)
    assert not told.publisher.loads
    assert not told.publisher.load_of_client
