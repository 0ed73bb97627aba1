"""For the tests of your client: a server that misbehaves by a script, and waits that take no time.

    script = [503, answer(429, {"Retry-After": "1"}), close, 201]
    with ScriptedServer(script) as server, no_wait(), Client(server.url) as client:
        response = client.post("/payments", json={"cents": 5})
    assert len(server.requests) == len(report(response).attempts) == 4

Step k of the script answers request k, and the last one repeats. A step is a status, one of the functions
here, or a function of yours that gets the `Peer` that asked. The server runs in threads of its own, on real
sockets: what it does to a client, a network does.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import IO, TypeAlias

from taptwice.client.world import REAL
from taptwice.core.problems import PROBLEMS
from taptwice.errors import Misuse

__all__ = [
    "Peer",
    "Request",
    "ScriptedServer",
    "answer",
    "close",
    "drip",
    "hang",
    "no_wait",
    "problem",
    "reset",
    "send",
]


@contextlib.contextmanager
def no_wait() -> Iterator[list[float]]:
    """Inside this block no client waits between attempts; the list is of the seconds it would have waited.

    Its clock goes on as if it had, so deadlines end a call as they would. Timeouts of a server that is slow
    are real. For clients that were given no `World` of their own, in all threads and tasks.
    """
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def asleep(seconds: float) -> None:
        waits.append(seconds)

    before = REAL.clock, REAL.sleep, REAL.asleep
    REAL.clock = lambda: time.monotonic() + sum(waits)
    REAL.sleep, REAL.asleep = sleep, asleep
    try:
        yield waits
    finally:
        REAL.clock, REAL.sleep, REAL.asleep = before


@dataclass(frozen=True)
class Request:
    """A request as it stood on the wire."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    connection: int
    """The number of the connection that it came on, from 1."""

    def header(self, name: str) -> str | None:
        """The first field with this name, in any case."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), None)


class Peer:
    """The client's end of a connection, as a step sees it."""

    def __init__(self, server: ScriptedServer, connection: socket.socket, request: Request) -> None:
        self.server = server
        self.request = request
        self._connection = connection
        self.open = True
        """Whether another request may come on this connection."""

    def send(self, data: bytes) -> None:
        """Send these bytes as they are."""
        self._connection.sendall(data)

    def pause(self, seconds: float) -> None:
        """Do nothing for so long, or until the server is stopped."""
        _ = self.server.stopping.wait(seconds)

    def close(self) -> None:
        """End the connection in order."""
        self.open = False

    def reset(self) -> None:
        """End the connection with a RST: the client's next read fails."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.open = False

    def wait_until_gone(self) -> None:
        """Wait for the client to hang up, which `ScriptedServer.hung_up` then counts."""
        with contextlib.suppress(OSError):
            while self._connection.recv(65536):
                pass
        self.open = False
        self.server.hung_up.release()


Step: TypeAlias = int | Callable[[Peer], None]


def answer(
    status: int,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    after: float = 0.0,
    chunked: bool = False,
) -> Callable[[Peer], None]:
    """Answer so, `after` so many seconds."""
    _check(status)

    def step(peer: Peer) -> None:
        peer.pause(after)
        lines = {**(headers or {}), **({"Transfer-Encoding": "chunked"} if chunked else {})}
        if not chunked:
            lines.setdefault("Content-Length", str(len(body)))
        whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked and body else body
        peer.send(_head(status, lines) + (b"" if peer.request.method == "HEAD" else whole))

    return step


def problem(status: int, name: str, headers: Mapping[str, str] | None = None) -> Callable[[Peer], None]:
    """Answer with one of taptwice's problem types, "in-progress" for instance."""
    if name not in PROBLEMS:
        raise ValueError(f"no problem {name!r}; there are {', '.join(PROBLEMS)}")
    body = json.dumps({"type": f"https://taptwice.dev/problems/{name}"}).encode()
    return answer(status, {"Content-Type": "application/problem+json", **(headers or {})}, body)


def send(*parts: bytes, every: float = 0.0) -> Callable[[Peer], None]:
    """Send these bytes, a pause between two parts, and close."""

    def step(peer: Peer) -> None:
        for number, part in enumerate(parts):
            peer.pause(every if number else 0.0)
            peer.send(part)
        peer.close()

    return step


def drip(
    body: bytes, every: float, *, head: bool = False, silent_after: int | None = None
) -> Callable[[Peer], None]:
    """Answer 200 one byte at a time: the body, or from the `head` on. Silent for good after so many bytes."""

    def step(peer: Peer) -> None:
        lines = _head(200, {"Content-Length": str(len(body))})
        at_once, slowly = (b"", lines + body) if head else (lines, body)
        peer.send(at_once)
        for number, byte in enumerate(slowly):
            if number == silent_after:
                peer.wait_until_gone()
                return
            peer.pause(every)
            peer.send(bytes([byte]))

    return step


def _check(step: object) -> None:
    if callable(step) or (type(step) is int and 100 <= step <= 999):
        return
    raise Misuse(
        f"{step!r} is no step: give a status of three digits, one of the functions here, or one of yours"
    )


def close(peer: Peer) -> None:
    """Close the connection instead of an answer."""
    peer.close()


def reset(peer: Peer) -> None:
    """Reset the connection instead of an answer."""
    peer.reset()


def hang(peer: Peer) -> None:
    """Never answer."""
    peer.wait_until_gone()


class ScriptedServer:
    """An HTTP/1.1 server on a local port that does what its script says."""

    def __init__(
        self, script: Sequence[Step] = (200,), *, listening: bool = True, tls: ssl.SSLContext | None = None
    ) -> None:
        """`listening=False`: connections are refused until `listen`. `tls`: a context with a certificate."""
        self.script = list(script)
        if not self.script:
            raise Misuse("an empty script: it needs one step at least, and the last one repeats")
        for step in self.script:
            _check(step)
        self.requests: list[Request] = []
        self.stopping = threading.Event()
        self.hung_up = threading.Semaphore(0)
        """Released for each client that hung up on a step that never answered."""
        self.connections = 0
        self._tls = tls
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._place = _bound(0)  # keeps the port while nobody listens on it
        self._socket: socket.socket | None = None
        self.port: int = self._place.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        if listening:
            self.listen()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def listen(self) -> None:
        """Accept connections from now on."""
        made = self._socket = _bound(self.port)
        made.listen(128)
        self._start(lambda: self._accept(made))

    def refuse(self) -> None:
        """Refuse connections until `listen`; those that are open stay so."""
        with self._lock:
            listening, self._socket = self._socket, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listening.close()

    def stop(self) -> None:
        """End all connections and wait for the threads."""
        self.stopping.set()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self.refuse()
        self._place.close()
        for thread in list(self._threads):
            thread.join()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
                self.connections += 1
                number = self.connections
            self._start(lambda connection=connection, number=number: self._serve(connection, number))  # type: ignore[misc]

    def _serve(self, connection: socket.socket, number: int) -> None:
        inner = connection
        try:
            if self._tls is not None:
                inner = self._tls.wrap_socket(connection, server_side=True)
            reader: IO[bytes] = inner.makefile("rb")
        except OSError:
            reader = io.BytesIO()  # a handshake that failed
        try:
            while not self.stopping.is_set():
                request = _read(reader, number)
                if request is None:
                    return
                with self._lock:
                    step = self.script[min(len(self.requests), len(self.script) - 1)]
                    self.requests.append(request)
                peer = Peer(self, inner, request)
                (answer(step) if isinstance(step, int) else step)(peer)
                if not peer.open:
                    return
        except OSError:  # the client has gone, or the server stops
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            reader.close()  # the socket closes only when nobody reads from it
            inner.close()


def _bound(port: int) -> socket.socket:
    """A socket with a place of its own; several of ours may have the same one, and one of them listens."""
    made = socket.socket()
    for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
        if hasattr(socket, option):
            made.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
    made.bind(("127.0.0.1", port))
    return made


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    phrase = HTTPStatus(status).phrase if status in list(HTTPStatus) else ""
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _read(reader: IO[bytes], number: int) -> Request | None:
    """The next request on a connection, None when there is no other."""
    first = reader.readline().split()
    if len(first) != 3:
        return None
    headers = []
    while line := reader.readline().strip().decode("latin-1"):
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    fields = {name.lower(): value for name, value in headers}
    if fields.get("transfer-encoding") == "chunked":
        body = b""
        while size := reader.readline().partition(b";")[0].strip():
            if int(size, 16) == 0:
                break
            body += reader.read(int(size, 16))
            _ = reader.readline()
        complete = size != b"" and reader.readline() != b""
    else:
        length = int(fields.get("content-length", 0))
        body = reader.read(length)
        complete = len(body) == length
    if not complete:
        return None  # the client gave up within its request, and nobody has answered that
    method, target, _ = (word.decode("latin-1") for word in first)
    return Request(method, target, tuple(headers), body, number)
