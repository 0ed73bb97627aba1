"""Requests through whatever client a test has: blocking or awaiting, in turn or at once.

The assertions are plans: they yield `Send` and `Read`, and `judged` drives them on the client. Clients are
those that have ``request(method, url, …)`` (httpx2, httpx, requests, Starlette's TestClient) and those of
Werkzeug and Flask, which have ``open(path, method=…)``; the options of a request are the client's own.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from taptwice.core.plan import Command, Plan, arun, ask, run
from taptwice.errors import Misuse
from taptwice.faults import Crash
from taptwice.testing.calls import Call, Outcome, answer_of, answered
from taptwice.testing.effects import Counting, Reading, reading_of

Response = TypeVar("Response", covariant=True)

UNDOUBLED = "taptwice_undoubled"
"""Where `twice` leaves the client's own method, through which assertions go on counting right."""


class Requesting(Protocol[Response]):
    """A client with ``request``."""

    @property
    def request(self) -> Callable[..., Response]: ...


class Opening(Protocol[Response]):
    """A client of Werkzeug's or Flask's."""

    @property
    def open(self) -> Callable[..., Response]: ...


# --- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send(Command[tuple[Outcome, ...]]):
    """Send these requests at once; the reply is what became of each, in their order."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Read(Command[Reading]):
    """Count the effects."""

    effects: Counting


def send(call: Call) -> Plan[Outcome]:
    """Send one request."""
    [outcome] = yield from ask(Send((call,)))
    return outcome


@dataclass(frozen=True)
class Verdict:
    """What a plan found: its failures in words, and the answer that the assertion gives back."""

    title: str
    failures: Sequence[str]
    answer: Outcome | None = None


# --- driving ----------------------------------------------------------------------------------------------


def method_of(client: Any) -> str:
    """The name of the method through which all requests of the client go."""
    name = next((name for name in ("request", "open") if callable(getattr(client, name, None))), None)
    if name is None:
        raise Misuse(
            f"cannot send through {type(client).__module__}.{type(client).__qualname__}: give a client that "
            "has request(method, url, …), or a test client of Werkzeug or Flask"
        )
    return name


def awaits(client: Any) -> bool:
    """Whether the client is to be awaited."""
    return inspect.iscoroutinefunction(getattr(client, method_of(client)))


def judged(plan: Plan[Verdict], client: Any) -> Any:
    """Drive the plan; the client's own response, or AssertionError. Awaitable where the client awaits."""
    __tracebackhide__ = True
    if awaits(client):
        return _judged_awaiting(plan, client)
    return _ruled(run(plan, sender(client).execute))


async def _judged_awaiting(plan: Plan[Verdict], client: Any) -> Any:
    __tracebackhide__ = True
    return _ruled(await arun(plan, sender(client).execute))


def _ruled(verdict: Verdict) -> Any:
    __tracebackhide__ = True
    if verdict.failures:
        raise AssertionError("\n  ".join([f"{verdict.title}:", *verdict.failures]))
    return None if verdict.answer is None else answered(verdict.answer).response


def sender(client: Any) -> Any:
    """What carries `Send` and `Read` out on this client."""
    request = getattr(client, method_of(client))
    request = getattr(request, UNDOUBLED, request)
    return (AwaitingSender if awaits(client) else BlockingSender)(client, request)


class BlockingSender:
    """Several at once are sent by threads."""

    def __init__(self, client: Any, request: Callable[..., Any]) -> None:
        self._client = client
        self._request = request

    def execute(self, command: Command[Any], /) -> Any:
        match command:
            case Send((call,)):
                return (self._outcome(self._request, call),)
            case Send(calls):
                return self._at_once(calls)
            case Read(effects):
                counted = effects()
                if inspect.isawaitable(counted):
                    if inspect.iscoroutine(counted):
                        counted.close()
                    raise Misuse(
                        "these effects await and the client does not: give Effects(…) a function that opens "
                        "a connection which blocks"
                    )
                return reading_of(counted)
            case _:
                raise AssertionError(f"no command of a test: {command}")

    def _at_once(self, calls: tuple[Call, ...]) -> tuple[Outcome, ...]:
        barrier = threading.Barrier(len(calls))

        def one(call: Call) -> Outcome:
            request = self._apart()
            barrier.wait()
            return self._outcome(request, call)

        with ThreadPoolExecutor(len(calls)) as threads:
            return tuple(threads.map(one, calls))

    def _apart(self) -> Callable[..., Any]:
        """Flask's client keeps the contexts of its last request: a thread must not meet another's."""
        if not hasattr(self._client, "preserve_context"):
            return self._request
        twin = copy.copy(self._client)
        twin.preserve_context, twin._context_stack, twin._new_contexts = False, ExitStack(), []
        return functools.partial(type(twin).open, twin)

    def _outcome(self, request: Callable[..., Any], call: Call) -> Outcome:
        try:
            return answer_of(request(*_arguments(self._client, call), **_options(self._client, call)))
        except (Exception, BaseExceptionGroup, Crash) as error:
            return error


class AwaitingSender:
    """Several at once are tasks of the event loop."""

    def __init__(self, client: Any, request: Callable[..., Awaitable[Any]]) -> None:
        self._client = client
        self._request = request

    async def execute(self, command: Command[Any], /) -> Any:
        match command:
            case Send(calls):
                return tuple(await asyncio.gather(*map(self._outcome, calls)))
            case Read(effects):
                counted = effects()
                return reading_of(await counted if inspect.isawaitable(counted) else counted)
            case _:
                raise AssertionError(f"no command of a test: {command}")

    async def _outcome(self, call: Call) -> Outcome:
        try:
            return answer_of(await self._request(call.method, call.url, **call.options))
        except (Exception, BaseExceptionGroup, Crash) as error:
            return error


def _arguments(client: Any, call: Call) -> Iterable[str]:
    return (call.method, call.url) if method_of(client) == "request" else (call.url,)


def _options(client: Any, call: Call) -> Mapping[str, Any]:
    return call.options if method_of(client) == "request" else {**call.options, "method": call.method}
