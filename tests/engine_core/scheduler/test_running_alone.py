"""A request that must run alone: nothing beside it, and everything after it."""

from driving import Drive, make_request, make_scheduler


def test_it_waits_for_the_running_ones_and_the_others_wait_for_it():
    first, alone, again, last = (
        make_request(name, 5, max_tokens=count)
        for name, count in (("first", 3), ("alone", 2), ("again", 2), ("last", 2))
    )
    alone.runs_alone = again.runs_alone = True
    drive = Drive(make_scheduler(), first, alone, again, last)
    steps = [drive.step().batch.req_ids]
    info = drive.scheduler.explain("alone")
    assert (info.waits_for.value, info.why) == (
        "alone",
        "request 'first' runs, and one of both must run alone",
    )
    steps += [drive.step().batch.req_ids for _ in range(8)]
    assert steps == [["first"]] * 3 + [["alone"]] * 2 + [["again"]] * 2 + [["last"]] * 2
