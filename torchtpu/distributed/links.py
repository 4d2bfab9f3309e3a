"""Connections between the ranks of a group, for notices, and for noticing who has ended.

A rank is connected with those whose distance in the ring is a power of two, and passes on what it hears for the first
time: all hear of it in log2(size) steps, as long as the ranks that are left are connected. A connection that breaks
before a farewell says that its rank has ended. Neither the store nor the rank that holds it takes part.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchtpu.runtime import _C

_CONNECT_SECONDS = 5.0  # to one of a rank's addresses
_FAREWELL_SECONDS = 1.0
_MAX_BYTES = 1 << 20  # of a notice
_MAX_TEXT = 8192
# Keeps idle connections known to what stands between machines; one that is paused for some minutes is not lost.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 60, socket.TCP_KEEPCNT: 10}
_SIOCGIFADDR = 0x8915


class Notice(NamedTuple):
    """What is said of a rank: "gone" (its connection broke), "left" (its farewell), or what the ranks agree on."""

    kind: str
    rank: int
    text: str = ""


class Links:
    """The connections of one rank in one group. `heard` is called in a thread of their own with each notice that is
    new, this rank's included."""

    def __init__(self, rank: int, heard: Callable[[Notice], None]) -> None:
        self._rank = rank
        self._heard = heard
        self._thread: threading.Thread | None = None
        self._wakes, self._waker = socket.socketpair()
        self._tasks: deque[Callable[[], None]] = deque()
        # What follows belongs to the thread.
        self._selector = selectors.DefaultSelector()
        self._links: dict[socket.socket, _Link] = {}
        self._known: set[tuple[str, int]] = set()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._is_leaving = False
        _everyones.add(self)

    def connect(self, store: Store, size: int, timeout: timedelta) -> None:
        """Waits until all neighbours are connected. All ranks call it, once."""
        connected: Future[None] = Future()

        def run() -> None:
            # Here, where no signal handler runs: what one raises may be an OSError too.
            try:
                self._meet(store, size, timeout)
            except Exception as error:  # noqa: BLE001 -- raised to who waits
                self._drop_all()
                for own in (self._wakes, self._waker, self._selector):
                    own.close()
                connected.set_exception(error)
            else:
                connected.set_result(None)
                self._run()

        self._thread = threading.Thread(target=run, name="torchtpu-peers", daemon=True)
        self._thread.start()
        connected.result()

    def _meet(self, store: Store, size: int, timeout: timedelta) -> None:
        around = neighbours(self._rank, size)
        deadline = time.monotonic() + timeout.total_seconds()
        token = secrets.token_hex(16)
        with _listen() as listener:
            here = {"addresses": _addresses(), "port": listener.getsockname()[1], "token": token}
            store.set(str(self._rank), json.dumps(here))
            for other in (other for other in around if other > self._rank):
                self._add(other, _call(json.loads(store.get(str(other))), self._rank, other, deadline))
            while missing := [other for other in around if other not in {link.rank for link in self._links.values()}]:
                self._add(*_answer(listener, token, missing, deadline))
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def tell(self, kind: str, text: str = "") -> None:
        """Tells all ranks something of this one, unless that has been done. May be called in any thread."""
        self._do(lambda: self._pass_on(Notice(kind, self._rank, text[:_MAX_TEXT])))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls it in the connections' thread, if there is one by then. Called there."""
        self._timers.append((time.monotonic() + seconds, act))

    def close(self) -> None:
        """Says farewell and ends the thread. May be called more than once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._do(self._leave)
            thread.join(2 * _FAREWELL_SECONDS)

    def forsake(self) -> None:
        """In a forked child: the connections are the parent's, and end with it."""
        self._thread = None
        for connection in self._links:
            connection.close()

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._links[connection] = _Link(rank)
        self._selector.register(connection, selectors.EVENT_READ)

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with _C.SignalsDeferred(), contextlib.suppress(OSError):  # closed, or full: the thread is about to wake up
            self._waker.send(b".")

    # in the thread

    def _run(self) -> None:
        while self._links or not self._is_leaving:
            now = time.monotonic()
            due = [act for at, act in self._timers if at <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for act in due:
                act()
            until = min((at for at, _ in self._timers), default=None)
            for key, events in self._selector.select(None if until is None else max(0.0, until - now)):
                if key.fileobj is self._wakes:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(4096)
                else:
                    self._serve(cast("socket.socket", key.fileobj), can_read=bool(events & selectors.EVENT_READ))
            while self._tasks:
                self._tasks.popleft()()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    def _serve(self, connection: socket.socket, *, can_read: bool = False) -> None:
        """Writes what there is to write, and reads where that does not wait."""
        if (link := self._links.get(connection)) is None:
            return
        lines: list[bytes] = []
        ending = ""
        try:
            if can_read:
                read = connection.recv(1 << 16)
                *lines, link.incoming = (link.incoming + read).split(b"\n")
                if not read or len(link.incoming) > _MAX_BYTES:
                    ending = "its connection is closed"
            if link.outgoing:
                del link.outgoing[: connection.send(link.outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            ending = f"its connection broke: {error.strerror}"
        if ending or (self._is_leaving and not link.outgoing):
            self._drop(connection)
        else:
            writes = selectors.EVENT_WRITE if link.outgoing else 0
            self._selector.modify(connection, selectors.EVENT_READ | writes)
        for line in lines:
            self._pass_on(Notice(*json.loads(line)), link.rank)
        if ending and not self._is_leaving and ("left", link.rank) not in self._known:
            self._pass_on(Notice("gone", link.rank, ending))

    def _pass_on(self, notice: Notice, source: int | None = None) -> None:
        if (notice.kind, notice.rank) in self._known:
            return
        self._known.add((notice.kind, notice.rank))
        line = (json.dumps(notice) + "\n").encode()
        for connection, link in list(self._links.items()):
            if link.rank != source:
                link.outgoing += line
                self._serve(connection)
        self._heard(notice)

    def _leave(self) -> None:
        self._pass_on(Notice("left", self._rank))
        self._is_leaving = True
        self.later(_FAREWELL_SECONDS, self._drop_all)  # of those who do not read
        for connection in list(self._links):
            self._serve(connection)

    def _drop_all(self) -> None:
        for connection in list(self._links):
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._links[connection]
        self._selector.unregister(connection)
        connection.close()


class _Link:
    """What is under way on one connection."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.incoming = b""
        self.outgoing = bytearray()


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks that one is connected with."""
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return sorted({(rank + way * step) % size for step in steps for way in (1, -1)})


def _listen() -> socket.socket:
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _call(where: dict[str, Any], rank: int, other: int, deadline: float) -> socket.socket:
    """A connection with another rank, which is told who calls."""
    errors = []
    for address in where["addresses"]:
        try:
            connection = socket.create_connection((address, where["port"]), _CONNECT_SECONDS)
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(f"{where['token']} {rank}\n".encode())
            if connection.recv(1) == b"\n":
                return _kept_alive(connection)
            connection.close()
            errors.append(f"{address}: somebody else listens there")
        except OSError as error:
            errors.append(f"{address}: {error}")
    raise dist.DistNetworkError(f"rank {rank} cannot reach rank {other} at port {where['port']}: {'; '.join(errors)}")


def _answer(listener: socket.socket, token: str, awaited: Sequence[int], deadline: float) -> tuple[int, socket.socket]:
    """The next rank that calls, and the connection with it."""
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            raise dist.DistNetworkError(f"ranks {[*awaited]} of the group have not connected in time") from None
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(_CONNECT_SECONDS)
            said, _, rank = connection.makefile("rb").readline(256).decode().partition(" ")
            if secrets.compare_digest(said, token) and int(rank) in awaited:
                connection.sendall(b"\n")
                return int(rank), _kept_alive(connection)
        connection.close()


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _addresses() -> list[str]:
    """Where other ranks may find this process, the likeliest first."""
    found = [_interface_address(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0])]
    for host in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing; this is where the way there begins
                    found.append(str(probe.getsockname()[0]))
    return [*dict.fromkeys(address for address in [*found, "127.0.0.1"] if address)]


def _interface_address(name: str) -> str:
    """The IPv4 address of a network interface, "" where it has none."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) if name else ""
    return ""


def _forsake_all() -> None:
    for links in list(_everyones):
        links.forsake()


_everyones: weakref.WeakSet[Links] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forsake_all)
