"""ZMQ as client and engine see it, in virtual time: DEALER, ROUTER, monitor and poller on a
simulated network. `test_traits.py` shows each trait on real sockets too.

- A message that was sent is on its way; a process that dies loses a tail of what it sent last.
- At the end of a connection its unread messages are dropped beyond PIPE_MESSAGES, unless the
  socket would connect again later (a reconnect interval above 0).
- A send to a peer that is gone: EHOSTUNREACH (ROUTER, mandatory), Again (DEALER).
- A send beyond the high-water mark: Again, until half of the queue has been read.
- The descriptor signals an event once: any call on the socket takes the signal.
"""

import itertools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import zmq as real_zmq

REQUEST_BYTES = 50
"""No other message of a client is as long."""
PIPE_MESSAGES = 99
"""What a DEALER with reconnect interval -1 still delivers after its connection has ended."""


class Network:
    """All sockets of a simulation.

    Attributes:
        listening: the ROUTER bound to each address.
    """

    def __init__(
        self,
        random: Random,
        call_later: Callable[[float, Callable[[], None]], object],
        log: Callable[[str], None],
    ) -> None:
        self.random = random
        self.call_later = call_later
        self.log = log
        self.listening: dict[str, SimSocket] = {}
        self.sockets: dict[int, SimSocket] = {}
        self.latency_s = 0.001
        self.num_messages = 0
        self.corrupts: str | None = None
        """The process whose requests arrive as garbage."""
        self._descriptors = itertools.count(10)
        self._identities = itertools.count(1)

    def is_readable(self, descriptor: int) -> bool:
        socket = self.sockets.get(descriptor)
        return socket is not None and socket.has_signal and not socket.process.is_paused

    def add(self, socket: "SimSocket") -> int:
        descriptor = next(self._descriptors)
        self.sockets[descriptor] = socket
        return descriptor

    def new_identity(self) -> bytes:
        return b"\0" + struct.pack(">I", next(self._identities))


class Process:
    """Whose sockets they are: it can die, and stand still."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.at_call: Callable[[str], None] = lambda _what: None
        """Called at every call into a socket."""


class Connection:
    """One DEALER on one ROUTER. Messages of a direction arrive in order."""

    def __init__(self, network: Network, dealer: "SimSocket", router: "SimSocket") -> None:
        self.network = network
        self.ends = {True: router, False: dealer}
        self.identity = network.new_identity()
        self.is_open = True
        self.is_cut = False
        self.is_full = False
        """Towards the DEALER."""
        self._queues: dict[bool, deque[list[bytes]]] = {True: deque(), False: deque()}
        router.connections[self.identity] = self

    def send(self, frames: list[bytes], *, to_router: bool) -> None:
        self.network.num_messages += 1
        if to_router and self.ends[False].process.name == self.network.corrupts:
            frames = [b"garbage" if len(frame) >= REQUEST_BYTES else frame for frame in frames]
        self._queues[to_router].append(frames)
        self._later(lambda: self._arrive(to_router))

    def num_under_way(self, *, to_router: bool) -> int:
        return len(self._queues[to_router])

    def _later(self, callback: Callable[[], None]) -> None:
        random, network = self.network.random, self.network
        network.call_later(network.latency_s * random.uniform(0.5, 1.5), callback)

    def _arrive(self, to_router: bool) -> None:
        """The oldest message is there; an end that was closed drops it."""
        queue = self._queues[to_router]
        if not queue:
            return
        frames = queue.popleft()
        end = self.ends[to_router]
        if not end.is_closed and not self.is_cut:
            end.deliver(([self.identity] if to_router else []) + frames, self)

    def end(self, *, by_router: bool, lost: int = 0) -> None:
        """One side has gone: what it sent before still arrives but for the last `lost` messages,
        and then the other side hears of it."""
        if not self.is_open:
            return
        self.is_open = False
        to_router = not by_router
        queue = self._queues[to_router]
        for _ in range(min(lost, len(queue))):
            queue.pop()
        self._queues[by_router].clear()  # on its way to the side that has gone
        self._hear_of_end(to_router)

    def cut(self) -> None:
        """The network loses the connection, with all that is under way in both directions."""
        if self.is_open:
            self.is_open = False
            self.is_cut = True
            if self.network.random.random() < 0.5:
                # the router has them already, and reads them when the next connection is there
                for frames in self._queues[True]:
                    self._deliver_late([self.identity, *frames])
            for to_router in (True, False):
                self._queues[to_router].clear()
                self._hear_of_end(to_router)

    def _deliver_late(self, frames: list[bytes]) -> None:
        router = self.ends[True]

        def deliver() -> None:
            if not router.is_closed:
                router.deliver(frames, self)

        self.network.call_later(self.network.random.random(), deliver)

    def _hear_of_end(self, to_router: bool) -> None:
        def hear() -> None:
            if self._queues[to_router] and not self.is_cut:
                self._later(hear)
            else:
                self.ends[to_router].disconnected(self)

        self._later(hear)


class Frame:
    """A received frame that was not copied."""

    def __init__(self, data: bytes, more: bool) -> None:
        self.bytes = data
        self.buffer = memoryview(data)
        self.more = more


class SimSocket:
    """A DEALER, a ROUTER or a monitor."""

    def __init__(self, network: Network, process: Process, kind: int) -> None:
        self.network = network
        self.process = process
        self.kind = kind
        self.is_closed = False
        self.has_signal = False
        self.inbox: deque[tuple[list[bytes], Connection | None]] = deque()
        self.options: dict[int, Any] = {}
        self._begun: list[bytes] = []
        """Frames of a message whose last one has not been given yet."""
        self._begun_receipt: list[bytes] = []
        """Frames of a message that have not been taken yet, behind those that have."""
        self.connections: dict[bytes, Connection] = {}
        """Of a ROUTER."""
        self.connection: Connection | None = None
        """Of a DEALER."""
        self.monitor: SimSocket | None = None
        self.on_arrival: Callable[[], None] = lambda: None
        self.descriptor = network.add(self)
        self.address = ""

    # what the network does

    def deliver(self, frames: list[bytes], connection: Connection | None) -> None:
        self.inbox.append((frames, connection))
        self.has_signal = True
        self.on_arrival()

    def disconnected(self, connection: Connection) -> None:
        if self.is_closed:
            return
        if self.kind == real_zmq.ROUTER:
            self.connections.pop(connection.identity, None)
            return
        if self.connection is connection:
            self.connection = None
            if self.options.get(real_zmq.RECONNECT_IVL, 100) < 0:
                while len(self.inbox) > PIPE_MESSAGES:
                    self.inbox.pop()
            self._report(real_zmq.EVENT_DISCONNECTED)

    def _report(self, event: int) -> None:
        if self.monitor is not None:
            self.monitor.deliver([struct.pack("=hi", event, 0), self.address.encode()], None)

    # what the code under test calls

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[option] = value

    def getsockopt(self, option: int) -> int:
        if option == real_zmq.FD:
            return self.descriptor
        assert option == real_zmq.EVENTS
        self.has_signal = False
        is_readable = self.inbox and not self.process.is_dead
        return (real_zmq.POLLIN if is_readable else 0) | real_zmq.POLLOUT

    def getsockopt_string(self, option: int) -> str:
        assert option == real_zmq.LAST_ENDPOINT
        return self.address

    def get_monitor_socket(self, _events: int) -> "SimSocket":
        self.monitor = SimSocket(self.network, self.process, real_zmq.PAIR)
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    def bind(self, address: str) -> None:
        self.address = address
        self.network.listening[address] = self

    def connect(self, address: str) -> None:
        self.address = address
        router = self.network.listening.get(address)
        if router is None:
            self.network.call_later(
                self.network.latency_s, lambda: self._report(real_zmq.EVENT_CLOSED)
            )
        else:
            self.connection = Connection(self.network, self, router)

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0, copy: bool = True) -> None:
        self.process.at_call("send")
        self.has_signal = False
        if self.process.is_dead:
            return
        parts = [bytes(frame) for frame in frames]
        if self.kind == real_zmq.ROUTER:
            connection = self.connections.get(parts[0])
            if connection is None:
                raise real_zmq.ZMQError(real_zmq.EHOSTUNREACH)
            limit = self.options.get(real_zmq.SNDHWM, 1000)
            num_unread = connection.num_under_way(to_router=False)
            num_unread += len(connection.ends[False].inbox)
            low_water = limit - (limit + 1) // 2
            if limit and (num_unread > low_water if connection.is_full else num_unread >= limit):
                connection.is_full = True
                raise real_zmq.Again()
            connection.is_full = False
            connection.send(parts[1:], to_router=False)
        elif self.connection is None:
            raise real_zmq.Again()
        else:
            self.connection.send(parts, to_router=True)

    def send(self, frame: bytes, flags: int = 0) -> None:
        self._begun.append(frame)
        if not flags & real_zmq.SNDMORE:
            frames, self._begun = self._begun, []
            self.send_multipart(frames, flags)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        self.process.at_call("receive")
        self.has_signal = False
        if not self.inbox or self.process.is_dead:
            raise real_zmq.Again()
        frames, _ = self.inbox.popleft()
        return list(frames)

    def recv(self, flags: int = 0, *, copy: bool) -> Frame:
        assert not copy
        if not self._begun_receipt:
            self._begun_receipt = self.recv_multipart(flags)
        frame = self._begun_receipt.pop(0)
        return Frame(frame, more=bool(self._begun_receipt))

    def close(self, linger: int | None = None) -> None:
        self.shut(lost=0)

    def shut(self, lost: int) -> None:
        """Of what was sent and has not arrived, the last `lost` messages of each connection never
        do."""
        if self.is_closed:
            return
        self.is_closed = True
        self.network.sockets.pop(self.descriptor, None)
        if self.network.listening.get(self.address) is self:
            del self.network.listening[self.address]
        for connection in [*self.connections.values(), self.connection]:
            if connection is not None:
                connection.end(by_router=self.kind == real_zmq.ROUTER, lost=lost)

    def __enter__(self) -> "SimSocket":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class SimContext:
    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self.sockets: list[SimSocket] = []

    def socket(self, kind: int) -> SimSocket:
        socket = SimSocket(self._network, self._process, kind)
        self.sockets.append(socket)
        return socket

    def term(self) -> None:
        pass

    def __enter__(self) -> "SimContext":
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class SimPoller:
    """Of the engine: `wait` is given the socket and the seconds, and returns when it may go on."""

    def __init__(self, wait: Callable[[SimSocket, float], None]) -> None:
        self._wait = wait
        self._socket: SimSocket | None = None

    def register(self, socket: Any, _events: int) -> None:
        if isinstance(socket, SimSocket):
            self._socket = socket

    def poll(self, timeout_ms: int) -> None:
        assert self._socket is not None
        self._socket.process.at_call("poll")
        self._wait(self._socket, timeout_ms / 1000)


class SimZmq:
    """Stands where a module names `zmq`, for one process."""

    def __init__(
        self,
        network: Network,
        process: Process,
        wait: Callable[[SimSocket, float], None] | None = None,
    ) -> None:
        self._network = network
        self._process = process
        self._wait = wait
        self.contexts: list[SimContext] = []

    def Context(self) -> SimContext:  # noqa: N802 - as in zmq
        context = SimContext(self._network, self._process)
        self.contexts.append(context)
        return context

    def Poller(self) -> SimPoller:  # noqa: N802 - as in zmq
        assert self._wait is not None
        return SimPoller(self._wait)

    def kill(self, lost: int) -> None:
        """The process died: no call has an effect any more, and its connections end."""
        self._process.is_dead = True
        for context in self.contexts:
            for socket in context.sockets:
                socket.shut(lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_zmq, name)
