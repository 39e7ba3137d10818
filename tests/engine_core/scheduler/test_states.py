"""Models whose layers keep a state: what they refuse, and that each pool is asked."""

import dataclasses

import pytest
from driving import Drive, make_request, make_scheduler

from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.scheduler import RequestStatus
from protocol.sampling import BeamSearchParams

STATE = KVCacheGroupSpec(2, goes_back=False)
GROUPS = (KVCacheGroupSpec(), dataclasses.replace(STATE, pool=1, span=2))


def test_beams_are_refused_by_name_where_a_layer_cannot_go_back():
    beams = make_request("a", 4, num_sequences=2, beam_search=BeamSearchParams(beam_width=2))
    drive = Drive(make_scheduler(groups=(STATE,)), beams)
    drive.step()
    assert beams.status is RequestStatus.FINISHED_IGNORED
    assert "beam search goes back a token" in drive.outputs[0].detail


@pytest.mark.parametrize(("num_states", "is_admitted"), [(2, False), (4, True)])
def test_a_request_waits_for_the_pool_that_lacks_blocks(num_states, is_admitted):
    """Each of two prompts of 16 tokens holds at most two states of 8 tokens."""
    a, b = make_request("a", 16), make_request("b", 16)
    scheduler = make_scheduler(num_blocks=[40, num_states], groups=GROUPS)
    drive = Drive(scheduler, a, b)
    drive.step()
    assert a.status is RequestStatus.RUNNING
    assert (b.status is RequestStatus.RUNNING) == is_admitted
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    drive.step()
    assert b.status is RequestStatus.RUNNING
    scheduler.check()


def test_a_request_that_no_pool_alone_holds_is_refused_with_its_numbers():
    request = make_request("a", 60)
    drive = Drive(make_scheduler(num_blocks=[4, 40], groups=GROUPS), request)
    drive.step()
    assert request.status is RequestStatus.FINISHED_IGNORED
    assert "shorten the prompt or raise --num-blocks" in drive.outputs[0].detail
