"""Time limits that hold: a timeout that knows its end, and the stream that looks at it at every read.

HTTP libraries take a timeout for each read, so a server that sends one byte a second is never too slow for
them. `Until` is such a timeout, an ordinary float to whoever does not know it; it also carries the moment
at which all must be over. Libraries hand timeouts down to the stream unread, and there `Watched` asks what
is left, before every connect, read and write. So one deadline covers the whole exchange, blocking code
needs no thread for it, and awaiting code no timer.

The same stream sees whether anything was written. A connection that was begun without a byte written is the
proof that nothing was sent; no exception's name is.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

FOREVER = 1_000_000.0
"""Seconds. Larger timeouts do not fit into what the operating system takes."""

PHASES = ("connect", "read", "write", "pool")
_PIECE = 65536


class Limit:
    """One attempt's end, and what was seen of it on the wire."""

    __slots__ = ("clock", "end", "wrote")

    def __init__(self, end: float, clock: Callable[[], float]) -> None:
        self.end = end
        """Monotonic seconds. May be moved while a stream is read, and holds from then on."""
        self.clock = clock
        self.wrote: bool | None = None
        """False: a connection was begun, and nothing written. None: nothing was seen at all."""

    def left(self) -> float:
        """Seconds, 0 or less when it is over."""
        return self.end - self.clock()

    def timeouts(self, given: Mapping[str, float | None]) -> dict[str, Until]:
        """The timeouts that httpcore takes, ending with this limit; `given` are its caller's, in seconds."""
        first = given.get("read")
        if given == dict.fromkeys(PHASES, first):  # the usual case, and this is done for every attempt
            return dict.fromkeys(PHASES, self.until(first))
        return {phase: self.until(given.get(phase)) for phase in PHASES}

    def until(self, seconds: float | None = None) -> Until:
        """A timeout of so many seconds, for a library; it ends with this limit."""
        phase = FOREVER if seconds is None else seconds.phase if isinstance(seconds, Until) else seconds
        end = self.end - self.clock()
        until = Until(phase if phase < end else end if end > 0.001 else 0.001)
        until.limit = self
        until.phase = phase
        return until

    def connecting(self) -> None:
        """A connection is begun."""
        if self.wrote is None:
            self.wrote = False


class Until(float):
    """A timeout in seconds that knows its `limit`."""

    __slots__ = ("limit", "phase")
    limit: Limit
    phase: float
    """What the caller allows for a single read, write or connect."""


@overload
def left(timeout: Until, too_late: type[Exception]) -> float: ...
@overload
def left(timeout: float | None, too_late: type[Exception]) -> float | None: ...
def left(timeout: float | None, too_late: type[Exception]) -> float | None:
    """What to give an operation that was given `timeout`. Raises `too_late` when its end has passed."""
    if not isinstance(timeout, Until):
        return timeout
    limit, phase = timeout.limit, timeout.phase
    seconds = limit.end - limit.clock()
    if phase < seconds:
        seconds = phase
    if seconds <= 0:
        raise too_late("the time limit of this attempt is over")
    return seconds


def watch(transport: Any, core: Any, backend: type[Any]) -> None:
    """Let a transport of httpx or httpx2 make its connections through a `backend` of this module.

    `core` is httpcore or httpcore2. A transport without a connection pool (a mock, ASGI) is left alone:
    there is no wire to watch, and exceptions decide.
    """
    pool: Any = getattr(transport, "_pool", None)
    inner = getattr(pool, "_network_backend", None)
    if inner is not None and not isinstance(inner, WatchedBackend | AsyncWatchedBackend):
        pool._network_backend = backend(inner, core)


def addresses_of(host: str, port: int) -> list[str]:
    """Where a host can be reached, each place once. Raises as `socket.getaddrinfo`, and blocks like it."""
    found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class WatchedBackend:
    """Connects for httpcore, within what is left."""

    def __init__(self, inner: Any, core: Any) -> None:
        self._inner = inner
        self._core = core

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> Watched:
        if not isinstance(timeout, Until):
            made = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
            return Watched(made, self._core)
        timeout.limit.connecting()
        # The library gives each address of a host the whole timeout; here they share it.
        try:
            addresses = addresses_of(host, port)
        except (OSError, UnicodeError) as error:
            raise self._core.ConnectError(str(error)) from error
        failure: Exception | None = None
        for place, address in enumerate(addresses):
            share = left(timeout, self._core.ConnectTimeout) / (len(addresses) - place)
            try:
                made = self._inner.connect_tcp(address, port, share, local_address, socket_options)
                return Watched(made, self._core)
            except (self._core.ConnectError, self._core.ConnectTimeout) as error:
                failure = failure or error
        raise failure or self._core.ConnectError(f"no address for {host}")

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> Watched:
        if isinstance(timeout, Until):
            timeout.limit.connecting()
        seconds = left(timeout, self._core.ConnectTimeout)
        return Watched(self._inner.connect_unix_socket(path, seconds, socket_options), self._core)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream:
    """What the blocking and the awaiting stream have in common."""

    def __init__(self, inner: Any, core: Any) -> None:
        self._inner = inner
        self._core = core
        self._socket = inner.get_extra_info("socket")
        self._arrived: Any = None
        if self._socket is not None and hasattr(select, "poll"):
            self._arrived = select.poll()
            self._arrived.register(self._socket, select.POLLIN)

    def get_extra_info(self, info: str) -> Any:
        # httpcore's pool asks for this twice a request, under its lock; its own streams make one each time.
        if info == "is_readable" and self._arrived is not None:
            return self._socket.fileno() < 0 or bool(self._arrived.poll(0))
        return self._inner.get_extra_info(info)


class Watched(_Stream):
    """A stream for httpcore that looks at the clock before it does anything.

    It reads and writes the socket itself: what httpcore's own stream would do, and with a watcher around
    that every call would pay for both.
    """

    def __init__(self, inner: Any, core: Any, secure: bool = False) -> None:
        super().__init__(inner, core)
        self._secure = secure

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        core = self._core
        try:
            self._socket.settimeout(left(timeout, core.ReadTimeout))
            data: bytes = self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise core.ReadTimeout(str(error)) from error
        except OSError as error:
            raise core.ReadError(str(error)) from error
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        core = self._core
        try:
            unsent = memoryview(buffer)
            while unsent:
                self._socket.settimeout(left(timeout, core.WriteTimeout))
                if isinstance(timeout, Until):
                    timeout.limit.wrote = True
                unsent = unsent[self._socket.send(unsent) :]
        except TimeoutError as error:
            raise core.WriteTimeout(str(error)) from error
        except OSError as error:
            raise core.WriteError(str(error)) from error

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> Any:
        seconds = left(timeout, self._core.ConnectTimeout)
        made = self._inner.start_tls(ssl_context, server_hostname, seconds)
        # TLS to a proxy, and again through it: no socket, but httpcore's stream, knows how to read that.
        kind = Delegating if self._secure else Watched
        return kind(made, self._core, True)


class Delegating(Watched):
    """A stream that leaves reading and writing to httpcore's own."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._inner.read(max_bytes, left(timeout, self._core.ReadTimeout))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # In pieces: what is below asks for a timeout once, and may then need many for a large buffer.
        for start in range(0, len(buffer), _PIECE):
            seconds = left(timeout, self._core.WriteTimeout)
            if isinstance(timeout, Until):
                timeout.limit.wrote = True
            self._inner.write(buffer[start : start + _PIECE], seconds)


class AsyncWatchedBackend:
    """Connects for httpcore, within what is left; what is below has one timeout for all addresses."""

    def __init__(self, inner: Any, core: Any) -> None:
        self._inner = inner
        self._core = core

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncWatched:
        if isinstance(timeout, Until):
            timeout.limit.connecting()
        seconds = left(timeout, self._core.ConnectTimeout)
        made = await self._inner.connect_tcp(host, port, seconds, local_address, socket_options)
        return AsyncWatched(made, self._core)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> AsyncWatched:
        if isinstance(timeout, Until):
            timeout.limit.connecting()
        seconds = left(timeout, self._core.ConnectTimeout)
        return AsyncWatched(await self._inner.connect_unix_socket(path, seconds, socket_options), self._core)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class AsyncWatched(_Stream):
    """The awaiting twin of `Watched`."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = await self._inner.read(max_bytes, left(timeout, self._core.ReadTimeout))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        seconds = left(timeout, self._core.WriteTimeout)
        if isinstance(timeout, Until) and buffer:
            timeout.limit.wrote = True
        await self._inner.write(buffer, seconds)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncWatched:
        seconds = left(timeout, self._core.ConnectTimeout)
        return AsyncWatched(await self._inner.start_tls(ssl_context, server_hostname, seconds), self._core)
