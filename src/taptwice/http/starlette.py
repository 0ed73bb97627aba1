"""Starlette: the edge as a route's middleware, the claim as a decorator of its endpoint.

once = Idempotency(Session, account=lambda request: request.user.account_id)

@once.keyed()
async def charge(request): ...

Route("/charges", charge, methods=["POST"], middleware=[Middleware(once.Edge)])
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette._exception_handler import wrap_app_handling_exceptions
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from taptwice.core.model import Answer
from taptwice.core.plan import Begin, Commit
from taptwice.core.policy import Policy, changed
from taptwice.errors import Misuse
from taptwice.flows.transaction import TURN, abandon
from taptwice.http.asgi import SCOPE_KEY, AsgiSettings, Conducted, conducted_in
from taptwice.http.driven import Driven
from taptwice.http.edge import BODILESS
from taptwice.http.request import NotSaved


def response_of(answer: Answer) -> Response:
    """An answer of ours as Starlette's. Repeated header lines stay repeated."""
    response = Response(answer.body or b"", answer.status)
    if answer.status in BODILESS:
        response.raw_headers = []
    for name, value in answer.headers:
        response.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
    return response


class HandedOver:
    """Stands for the claim's connection from before the claim; used too early or too late, it says so."""

    def __init__(self, conducted: Conducted) -> None:
        object.__setattr__(self, "_conducted", conducted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conducted.handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._conducted.handle, name, value)


def handed_over(scope: Scope) -> HandedOver | None:
    """The claim's connection, in a keyed request."""
    conducted = scope.get(SCOPE_KEY)
    return None if conducted is None else HandedOver(conducted)


def connections(once: AsgiSettings) -> Callable[[], AsyncIterator[Any]]:
    """What gives a plain route a connection in a transaction of its own."""

    async def connection() -> AsyncIterator[Any]:
        driven = Driven(once.source.open(), once.source.blocking, once.threads)
        try:
            await driven.execute(Begin(TURN))
            yield driven.executor.handle
            await driven.execute(Commit())
        finally:
            await driven.finish(abandon())

    return connection


def session_maker(once: AsgiSettings) -> Callable[[], Any] | None:
    """What makes sessions that join a claim; None where the origin makes no sessions."""
    if not type(once.origin).__module__.startswith("sqlalchemy") or not hasattr(once.origin, "configure"):
        return None
    from taptwice.http.joined import joined, watch  # SQLAlchemy is an extra

    _ = once.source  # refuses a maker that is bound to no engine, or to several
    maker: Callable[[], Any] = joined(once.origin)
    watch(once.origin.kw["bind"])
    return maker


def sessions(once: AsgiSettings, maker: Callable[[], Any] | None) -> Callable[..., Any]:
    """What gives a session for a while: inside a claim in its transaction, elsewhere a plain one."""
    if maker is None:

        async def missing() -> AsyncIterator[Any]:
            raise Misuse("once.session needs a session maker: Idempotency(async_sessionmaker(engine), …)")
            yield

        return missing

    from taptwice.http.joined import left_to_claim

    if once.source.blocking:

        def session() -> Iterator[Any]:
            made = maker()
            try:
                yield made
            except BaseException:
                made.close()
                raise
            if left_to_claim(made):
                made.flush()
            else:
                made.close()

        return session

    async def async_session() -> AsyncIterator[Any]:
        made = maker()
        try:
            yield made
        except BaseException:
            await made.close()
            raise
        if left_to_claim(made):
            await made.flush()
        else:
            await made.close()

    return async_session


class Edge:
    """The edge around one route, as its innermost middleware. The endpoint's decorator carries the policy."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, app = scope.get("endpoint"), self.app
        if inspect.isclass(endpoint):
            endpoint = getattr(endpoint, scope.get("method", "").lower(), None)
            app = self._handling
        marked: Marked | None = getattr(endpoint, MARK, None)
        if marked is None:
            await self.app(scope, receive, send)
            return
        route = getattr(scope.get("route"), "path", None) or scope["path"]
        await marked.once.serve(
            app, marked.policy, route, scope, receive, send, read=marked.parse is not None
        )

    async def _handling(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What a class raises becomes its answer inside the edge, as Starlette has it for functions."""
        request = Request(scope, receive, send)
        await wrap_app_handling_exceptions(self.app, request)(scope, receive, send)


MARK = "__taptwice_keyed__"


@dataclass(frozen=True, slots=True)
class Marked:
    """What `keyed` left on an endpoint, for the edge to find."""

    once: Idempotency
    policy: Policy
    parse: Callable[[Request], Any] | None


class Idempotency(AsgiSettings):
    """Idempotency for Starlette.

    `account` gets the request and gives text, or None for nobody; it may be a coroutine function, and may
    raise an HTTPException: it runs before anything is replayed. The other arguments are those of
    `AsgiSettings`.
    """

    Edge = Edge

    def __init__(self, origin: Any, *, account: Callable[[Request], Any], **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.account = account
        make = sessions(self, session_maker(self))
        manager = contextmanager if inspect.isgeneratorfunction(make) else asynccontextmanager
        self.session: Callable[[], Any] = manager(make)
        """A session, for ``async with once.session()`` (or ``with``, where the session maker blocks)."""

    def connection(self, request: Request) -> Any:
        """The connection of the claim."""
        return conducted_in(request.scope).handle

    def keyed(self, *, parse: Callable[[Request], Any] | None = None, **changes: Any) -> Callable[[Any], Any]:
        """Decorator of a keyed endpoint: a function, or a method of an HTTPEndpoint.

        `parse` gets the request before the claim, and may refuse it: by an HTTPException, or `NotSaved`. The
        other settings are those of `Policy`.
        """
        policy = changed(self.policy, **changes)

        def decorate(endpoint: Any) -> Any:
            is_async = inspect.iscoroutinefunction(endpoint)

            @functools.wraps(endpoint)
            async def claimed(*arguments: Any) -> Any:
                request: Request = arguments[-1]
                if request.method not in policy.methods:
                    return await _call(endpoint, is_async, *arguments)
                conducted = conducted_in(request.scope)
                try:
                    account = await _awaited(self.account(request))
                    if parse is not None:
                        await _awaited(parse(request))
                except NotSaved as refused:
                    return returned(refused.answer)
                call = functools.partial(_call, endpoint, is_async, *arguments)
                return await claim_and_call(conducted, account, call, is_async)

            setattr(claimed, MARK, Marked(self, policy, parse))
            return claimed

        return decorate


async def _call(endpoint: Any, is_async: bool, *arguments: Any) -> Any:
    return await (endpoint(*arguments) if is_async else run_in_threadpool(endpoint, *arguments))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def claim_and_call(
    conducted: Conducted, account: str | None, call: Callable[[], Awaitable[Any]], is_async: bool
) -> Any:
    """Claim, then do the work; or the answer in its place."""
    answer = await conducted.claim(account)
    if answer is not None:
        return response_of(answer)
    exchange = conducted.exchange
    try:
        result = await (call() if is_async else conducted.call(call))
        await conducted.flush()
    except NotSaved as refused:
        exchange.not_saved = True
        return returned(refused.answer)
    except BaseException:
        exchange.raised = True
        raise
    exchange.current.returned = True
    return result


def returned(answer: Any) -> Any:
    """What a handler gave to `NotSaved`, as it could have returned it."""
    return response_of(answer) if isinstance(answer, Answer) else answer
