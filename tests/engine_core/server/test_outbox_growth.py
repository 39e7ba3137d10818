"""A step's messages cost nothing for clients that only listen, and for one that does not read no
more the more there are of them. Counted in lines of Python, not in time."""

import pytest

from engine_core.observers.step_suspects import StepSuspects
from engine_core.process.suspects import Suspects
from engine_core.server.clients import ClientRegistry, Rights
from engine_core.server.outbox import Outbox
from engine_core.server.transport import SlowConsumer
from protocol.outputs import EngineCoreOutputs, Heartbeat
from tests.engine_core.lines_run import lines_run

HEARTBEAT_S = 1.0


class Transport:
    is_full = False

    def __init__(self):
        self.sent = []

    def send(self, identity, frames):
        if self.is_full:
            raise SlowConsumer("full")
        self.sent.append(identity)


class Office:
    """An outbox with that many clients, all of whom were sent something."""

    def __init__(self, num_clients):
        self.now_s = 10.0
        self.transport, self.clients = Transport(), ClientRegistry()
        self.outbox = Outbox(
            self.transport, self.clients, heartbeat_s=HEARTBEAT_S, clock=lambda: self.now_s
        )
        for number in range(num_clients):
            self.outbox.post(self.clients.add(b"%d" % number, "", Rights()), Heartbeat())
        self.transport.sent.clear()

    def outputs(self, *numbers):
        return {number: EngineCoreOutputs(other_outputs=[]) for number in numbers}


def test_a_step_costs_nothing_for_clients_that_only_listen():
    costs = []
    for num_clients in (2, 500):
        office = Office(num_clients)
        office.now_s += HEARTBEAT_S / 2
        costs.append(lines_run(lambda office=office: office.outbox.send(office.outputs(1))))
    assert costs[0] == costs[1]


def test_a_message_to_one_that_does_not_read_costs_the_same_beside_many_of_them():
    costs = []
    for num_clients in (2, 500):
        office = Office(num_clients)
        office.transport.is_full = True
        for client in office.clients:
            office.outbox.post(client, EngineCoreOutputs(other_outputs=[]))
        first = next(iter(office.clients))
        outputs = EngineCoreOutputs(other_outputs=[])
        costs.append(lines_run(lambda o=office, c=first, m=outputs: o.outbox.post(c, m)))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("leaves", [False, True])
def test_each_client_hears_of_the_engine_once_in_a_heartbeat(leaves):
    office = Office(5)
    for _ in range(3):
        office.now_s += HEARTBEAT_S / 2
        office.outbox.send(office.outputs(2))
    assert sorted(office.transport.sent) == [b"0", b"1", b"2", b"2", b"2", b"3", b"4"]
    if leaves:
        office.clients.remove(office.clients.by_index(3))
    office.transport.sent.clear()
    office.now_s += HEARTBEAT_S
    office.outbox.send({})
    assert sorted(office.transport.sent) == [b"%d" % n for n in range(5) if n != 3 or not leaves]


def test_a_client_whose_queue_has_room_again_is_not_counted_as_waiting():
    """The bytes of all that do not read are known without asking each: none is left behind."""
    office = Office(3)
    office.transport.is_full = True
    for _ in range(3):
        office.outbox.send(office.outputs(0, 1, 2))
    assert office.outbox.backlog_bytes == sum(
        backlog.num_bytes for backlog in office.outbox.backlogs.values()
    )
    office.clients.remove(office.clients.by_index(1))
    office.transport.is_full = False
    office.outbox.send({})
    assert office.outbox.backlog_bytes == 0
    assert not office.outbox.has_backlogs


def test_suspects_of_a_batch_that_stays_are_not_looked_up_again():
    class Plan:
        step_id = 0

    costs = []
    for num_running in (4, 400):
        plan, observer = Plan(), StepSuspects(Suspects())
        plan.batch = Plan()
        plan.batch.req_ids = [f"r{number}" for number in range(num_running)]
        observer.on_plan(plan, 0.0)
        costs.append(lines_run(lambda plan=plan, o=observer: o.on_plan(plan, 0.0)))
    assert costs[0] == costs[1]
