"""Models whose layers keep a state: each pool is asked."""

import pytest
from driving import Drive, make_request, make_scheduler

from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.scheduler import RequestStatus

STATE = KVCacheGroupSpec(2, is_sparse=True, pool=1)
GROUPS = (KVCacheGroupSpec(), STATE)


@pytest.mark.parametrize(("num_states", "is_admitted"), [(4, False), (8, True)])
def test_a_request_waits_for_the_pool_that_lacks_blocks(num_states, is_admitted):
    """Each of two prompts of 16 tokens holds at most four states."""
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
