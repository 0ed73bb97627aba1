"""Every way into the client, behind one face, so that each case is written once and tried on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import httpx2
import requests

from taptwice.client import httpx as ours_httpx
from taptwice.client import httpx2 as ours_httpx2
from taptwice.client.aiohttp import RetryMiddleware
from taptwice.client.http import AsyncClient, Client
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Attempted, Ended, Report, report
from taptwice.client.requests import RetryAdapter
from taptwice.client.world import World
from tests.client.fake import C0


@dataclass
class Result:
    """What the caller got."""

    status: int | None
    body: bytes
    error: Exception | None
    report: Report
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> list[int | str]:
        """Statuses of the attempts, and outcomes where there was none."""
        return [each.status or str(each.outcome) for each in self.report.attempts]


@dataclass
class Setting:
    """How a case wants its client."""

    policy: RetryPolicy = C0
    u: Callable[[], float] = lambda: 1.0
    on_wait: Callable[[int], None] = lambda number: None
    """Called instead of the n-th wait, from 1."""
    budget: Any = None
    breaker: Any = None


class Session:
    """A client under test. Its waits take no time, and its clock goes on as if they had."""

    def __init__(self, door: Door, setting: Setting) -> None:
        self.door = door
        self.waits: list[float] = []
        self.events: list[Attempted | Ended] = []
        self._setting = setting

        def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            setting.on_wait(len(self.waits))

        async def asleep(seconds: float) -> None:
            sleep(seconds)

        self.world = World(
            clock=lambda: time.monotonic() + sum(self.waits), sleep=sleep, asleep=asleep, draw=setting.u
        )
        self.options: dict[str, Any] = {
            "policy": setting.policy,
            "world": self.world,
            "budget": setting.budget and (lambda: setting.budget),
            "breaker": setting.breaker and (lambda: setting.breaker),
            "listeners": [self.events.append],
        }
        self._runner = asyncio.Runner() if door.awaiting else None
        self.client: Any = self._do(door.make(self))

    def _do(self, made: Any) -> Any:
        if inspect.isawaitable(made):
            assert self._runner is not None

            async def wait() -> Any:
                return await made

            return self._runner.run(wait())
        return made

    def call(
        self,
        method: str,
        url: str,
        *,
        content: Any = None,
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> Result:
        """Make one call; `stream`: read the body piece by piece after the response has been handed over."""
        try:
            found = self._do(self.door.call(self, method, url, content, headers or {}, stream))
        except Exception as error:
            if stream:  # what breaks while the caller reads is his
                raise
            return Result(None, b"", error, report(error))
        response, body, fields = found
        return Result(self.door.status(response), body, None, report(response), fields)

    def close(self) -> None:
        """Close the client."""
        self._do(self.door.close(self.client))
        if self._runner is not None:
            self._runner.close()


class Door:
    """One way in: how a client is made, called and closed."""

    name = ""
    awaiting = False
    wrapper = False
    """One of our own clients: it takes factories and raises typed errors."""

    @contextlib.contextmanager
    def open(self, **setting: Any) -> Iterator[Session]:
        """A session with these settings."""
        session = Session(self, Setting(**setting))
        try:
            yield session
        finally:
            session.close()

    def make(self, session: Session) -> Any:
        raise NotImplementedError

    def call(
        self, session: Session, method: str, url: str, content: Any, headers: dict[str, str], stream: bool
    ) -> Any:
        raise NotImplementedError

    def status(self, response: Any) -> int:
        return int(response.status_code)

    def close(self, client: Any) -> Any:
        return client.close()


class Blocking(Door):
    def call(
        self, session: Session, method: str, url: str, content: Any, headers: dict[str, str], stream: bool
    ) -> Any:
        if stream:
            with session.client.stream(method, url, content=content, headers=headers) as response:
                return response, b"".join(response.iter_bytes()), dict(response.headers)
        response = session.client.request(method, url, content=content, headers=headers)
        return response, response.content, dict(response.headers)


class Awaiting(Door):
    awaiting = True

    async def call(
        self, session: Session, method: str, url: str, content: Any, headers: dict[str, str], stream: bool
    ) -> Any:
        client = session.client
        if stream:
            async with client.stream(method, url, content=content, headers=headers) as response:
                return response, b"".join([part async for part in response.aiter_bytes()]), {}
        response = await client.request(method, url, content=content, headers=headers)
        return response, response.content, dict(response.headers)

    async def close(self, client: Any) -> None:
        await client.aclose()


class Httpx2(Blocking):
    name, wrapper = "httpx2 Client", True

    def make(self, session: Session) -> Any:
        return Client(**session.options)


class AsyncHttpx2(Awaiting):
    name, wrapper = "httpx2 AsyncClient", True

    def make(self, session: Session) -> Any:
        return AsyncClient(**session.options)


class Httpx(Blocking):
    name, wrapper = "httpx Client", True

    def make(self, session: Session) -> Any:
        return Client(http=httpx.Client(timeout=None), **session.options)


class AsyncHttpx(Awaiting):
    name, wrapper = "httpx AsyncClient", True

    def make(self, session: Session) -> Any:
        return AsyncClient(http=httpx.AsyncClient(timeout=None), **session.options)


class Httpx2Transport(Blocking):
    name = "httpx2 transport"

    def make(self, session: Session) -> Any:
        return httpx2.Client(transport=ours_httpx2.RetryTransport(**session.options), timeout=None)


class AsyncHttpx2Transport(Awaiting):
    name = "httpx2 async transport"

    def make(self, session: Session) -> Any:
        return httpx2.AsyncClient(transport=ours_httpx2.AsyncRetryTransport(**session.options), timeout=None)


class HttpxTransport(Blocking):
    name = "httpx transport"

    def make(self, session: Session) -> Any:
        return httpx.Client(transport=ours_httpx.RetryTransport(**session.options), timeout=None)


class AsyncHttpxTransport(Awaiting):
    name = "httpx async transport"

    def make(self, session: Session) -> Any:
        return httpx.AsyncClient(transport=ours_httpx.AsyncRetryTransport(**session.options), timeout=None)


class Requests(Door):
    name = "requests adapter"

    def make(self, session: Session) -> Any:
        made = requests.Session()
        for scheme in ("http://", "https://"):
            made.mount(scheme, RetryAdapter(**session.options))
        return made

    def call(
        self, session: Session, method: str, url: str, content: Any, headers: dict[str, str], stream: bool
    ) -> Any:
        response = session.client.request(method, url, data=content, headers=headers, stream=stream)
        body = b"".join(response.iter_content(None)) if stream else response.content
        return response, body, dict(response.headers)


class Aiohttp(Door):
    name, awaiting = "aiohttp middleware", True

    async def make(self, session: Session) -> Any:
        return aiohttp.ClientSession(middlewares=[RetryMiddleware(**session.options)])

    async def call(
        self, session: Session, method: str, url: str, content: Any, headers: dict[str, str], stream: bool
    ) -> Any:
        async with session.client.request(method, url, data=content, headers=headers) as response:
            if stream:
                return response, b"".join([part async for part in response.content.iter_any()]), {}
            return response, await response.read(), dict(response.headers)

    def status(self, response: Any) -> int:
        return int(response.status)


DOORS: tuple[Door, ...] = (
    Httpx2(),
    AsyncHttpx2(),
    Httpx(),
    AsyncHttpx(),
    Httpx2Transport(),
    AsyncHttpx2Transport(),
    HttpxTransport(),
    AsyncHttpxTransport(),
    Requests(),
    Aiohttp(),
)
