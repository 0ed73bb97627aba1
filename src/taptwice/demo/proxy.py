"""The network: a TCP proxy between client and server that can lose a reply."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Proxy:
    """Passes bytes on. A client uses one connection for one request, so a reply is everything up to its end.

    A client that hangs up is not reported to the server: a phone that loses its signal says nothing either.
    """

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self._upstream = upstream
        self._lost: asyncio.Future[int] | None = None
        self._server: asyncio.Server | None = None
        self._trips: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for trip in self._trips:
            trip.cancel()
        await asyncio.gather(*self._trips, return_exceptions=True)

    def lose_next(self) -> asyncio.Future[int]:
        """Lose the reply on the next connection. The future gets the number of bytes that were lost."""
        self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine function: asyncio would make the task, and on 3.11 complain when it is cancelled.
        trip = asyncio.create_task(self._trip(reader, writer))
        self._trips.add(trip)
        trip.add_done_callback(self._trips.discard)

    async def _trip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost, self._lost = self._lost, None
        try:
            reply, request = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        there = asyncio.create_task(_pass_on(reader, request))
        try:
            if lost is None:
                await _pass_on(reply, writer)
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            else:
                swallowed = len(await reply.read())
                writer.transport.abort()
                if not lost.done():
                    lost.set_result(swallowed)
        finally:
            there.cancel()
            request.close()
            writer.transport.abort()  # without effect where it is closed


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Broken pipes are what this is about: whoever is left reads an end, or nothing.
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
