"""Server, proxy and client: started together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from taptwice.demo.databases import Database, DemoError
from taptwice.demo.proxy import Proxy

ACCOUNT = "acct_42"
PATIENCE_S = 10.0
"""For any single step. Each takes milliseconds; one that takes this long will not come any more."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, as the client got it."""

    status: int
    body: str
    replayed: bool


class Server:
    """The process, seen from outside."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[Event] = []
        self._news = asyncio.Condition()
        self._over = False

    async def listen(self) -> None:
        """Collect what it tells until it ends."""
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe; said for mypy
        async for line in self.process.stdout:
            async with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        async with self._news:
            self._over = True
            self._news.notify_all()

    async def next(self, position: int) -> Event | None:
        """The event at a position, as soon as it is there; None when there will be none."""
        async with self._news:
            await self._news.wait_for(lambda: self._over or len(self.events) > position)
        return self.events[position] if len(self.events) > position else None

    async def told(self, event: str, after: int = 0, **details: Any) -> Event:
        """The first event with these details from position `after` on, whether it was told or is to come."""
        wanted = {"event": event, **details}
        position = after
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := await self.next(position)) is not None:
                    if wanted.items() <= found.items():
                        return found
                    position += 1
        except TimeoutError:
            raise DemoError(f"the server did not get as far as {wanted} within {PATIENCE_S:g} s") from None
        raise DemoError("the server ended by itself")

    def order(self, word: str) -> None:
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe; said for mypy
        self.process.stdin.write(f"{word}\n".encode())

    async def hold(self) -> None:
        """The next piece of work stops in its middle until `release`."""
        position = len(self.events)
        self.order("hold")
        await self.told("holding", after=position)

    def release(self) -> None:
        self.order("release")

    async def end(self) -> None:
        """The end of its stdin tells it to; if it does not hear, by force."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe; said for mypy
        self.process.stdin.close()
        for force in (self.process.terminate, self.process.kill, lambda: None):
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                await asyncio.wait_for(self.process.wait(), 4)
                return
            with contextlib.suppress(ProcessLookupError):
                force()


class Stage:
    """What the scenes are played on."""

    def __init__(self, database: Database, server: Server, proxy: Proxy, port: int) -> None:
        self.database = database
        self.server = server
        self.proxy = proxy
        self.address = f"http://127.0.0.1:{port}"
        self._client = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{proxy.port}",
            # One connection for each attempt, as from a phone that has lost the last one.
            headers={"Authorization": f"Bearer {ACCOUNT}", "Connection": "close"},
            timeout=PATIENCE_S,
            trust_env=False,  # HTTP_PROXY and the like are not meant for this
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, tap: str, path: str, amount: int, key: str | None = None) -> Reply | None:
        """Pay. None: no answer came. `tap` names the request for the server's account of it."""
        headers = {"X-Tap": tap}
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            response = await self._client.post(
                path, json={"amount_cents": amount, "currency": "eur"}, headers=headers
            )
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            return None
        return _reply(response)

    async def get(self, tap: str, path: str) -> Reply:
        """Ask."""
        return _reply(await self._client.get(path, headers={"X-Tap": tap}))


def _reply(response: httpx2.Response) -> Reply:
    return Reply(response.status_code, response.text, response.headers.get("idempotent-replayed") == "true")


@asynccontextmanager
async def staged(database: Database) -> AsyncIterator[Stage]:
    """A running server on this database, with everything around it."""
    with tempfile.TemporaryFile() as log:
        async with AsyncExitStack() as stack:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taptwice.demo.server"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "DATABASE_URL": database.url},  # not an argument: it may hold a password
                start_new_session=True,  # Ctrl-C is for us; the server ends when we say so
            )
            server = Server(process)
            listening = asyncio.create_task(server.listen())
            stack.callback(listening.cancel)
            stack.push_async_callback(server.end)
            try:
                port: int = (await server.told("listening"))["port"]
                proxy = await stack.enter_async_context(Proxy(port))
                stage = Stage(database, server, proxy, port)
                stack.push_async_callback(stage.close)
                yield stage
            except (DemoError, httpx2.HTTPError) as error:
                raise DemoError(f"{str(error) or type(error).__name__}\n{_tail(log)}".rstrip()) from error


def _tail(log: Any) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-15:]
    return "\n".join(["what the server said last:", *(f"  {line}" for line in lines)]) if lines else ""
