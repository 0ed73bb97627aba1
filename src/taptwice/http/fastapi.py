"""FastAPI: a router whose marked routes are keyed.

    once = Idempotency(Session, account=current_account)
    router = APIRouter(route_class=IdempotentRoute)
    DB = Annotated[AsyncSession, Depends(once.session)]

    @router.post("/charges", status_code=201, dependencies=[once.keyed(window="24h")])
    async def charge(body: ChargeIn, db: DB) -> ChargeOut: ...

The edge is placed around the route (`IdempotentRoute.handle`), the claim at the call of its endpoint: by
then FastAPI has run the login and validated the request.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.concurrency import contextmanager_in_threadpool
from fastapi.dependencies.utils import get_typed_signature
from fastapi.params import Depends as DependsParameter
from fastapi.requests import HTTPConnection
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from taptwice.core.policy import Policy, changed
from taptwice.errors import Misuse
from taptwice.http.asgi import SCOPE_KEY, AsgiSettings, Conducted, conducted_in
from taptwice.http.openapi import describe
from taptwice.http.request import NotSaved
from taptwice.http.starlette import claim_and_call, connections, handed_over, session_maker, sessions

__all__ = ["Idempotency", "IdempotentRoute", "NotSaved"]

TWICE = "this route is marked as keyed twice: one route, one marker"

ACCOUNT = "taptwice_account"
CONNECTION = "taptwice_connection"
KEYED = "__taptwice_keyed__"


class Keyed:
    """The marker of a keyed route, and its policy. As a dependency it only checks that its edge is there."""

    def __init__(self, once: Idempotency, policy: Policy) -> None:
        self.once = once
        self.policy = policy

    async def __call__(self, request: Request) -> None:  # async: FastAPI runs a blocking one in a thread
        if request.method in self.policy.methods and (
            conducted_in(request.scope).exchange.policy is not self.policy
        ):
            raise Misuse(TWICE)

    # Not as text: FastAPI before 0.116 does not find the names that an instance's annotations mean.
    __call__.__annotations__["request"] = Request


class Idempotency(AsgiSettings):
    """Idempotency for FastAPI.

    `account` is a dependency: it runs, and refuses, before anything is replayed. It gives text, or None for
    nobody. The other arguments are those of `AsgiSettings` and `Settings`.
    """

    def __init__(self, origin: Any, *, account: Callable[..., Any], **settings: Any) -> None:
        super().__init__(origin, **settings)
        if not callable(account):
            raise Misuse(
                "account must be a dependency: a function that gives the account of whoever is logged in"
            )
        self.account = account
        self.session = _session(self)
        """Dependency: a session; inside a keyed handler it works in the claim's transaction."""
        self.connection = _connection(connections(self))
        """Dependency: a connection of the driver; inside a keyed handler the claim's own."""

    def keyed(self, **changes: Any) -> Any:
        """The marker of a keyed route, for ``dependencies=[…]``; its settings are those of `Policy`."""
        return Depends(Keyed(self, changed(self.policy, **changes)))


# In a keyed request neither dependency is a generator: FastAPI's way with those costs as much as a statement.
ENDS = "scope" in inspect.signature(Depends).parameters
"""Whether this FastAPI knows two ends of a dependency, and keeps a stack of what is to be done at each."""


def _session(once: Idempotency) -> Callable[..., Any]:
    """The dependency: a session that works in the claim's transaction, or a plain one."""
    maker = session_maker(once)
    make = sessions(once, maker)
    if maker is None or not ENDS:
        return make
    blocking = once.source.blocking

    def plain() -> AbstractAsyncContextManager[Any]:
        return (
            contextmanager_in_threadpool(contextmanager(make)()) if blocking else asynccontextmanager(make)()
        )

    async def session(request: HTTPConnection) -> Any:  # a websocket's too
        stack: AsyncExitStack = request.scope["fastapi_inner_astack"]
        if SCOPE_KEY not in request.scope:
            return await stack.enter_async_context(plain())
        made = maker()
        stack.push_async_callback(close_unclaimed, made)
        return made

    return session


async def close_unclaimed(session: Any) -> None:
    """Close a session that has worked outside the claim: a login's, of a request that was refused."""
    inner = getattr(session, "sync_session", session)
    if inner.claimed_by is not None or not inner.in_transaction():
        return  # it is settled with the claim, or was
    await (run_in_threadpool(session.close) if inner is session else session.close())


def _connection(make: Callable[[], AsyncIterator[Any]]) -> Callable[[Request], Any]:
    """The dependency: the claim's connection, or one that is committed before the answer is sent.

    FastAPI ends a dependency with ``yield`` after that, unless it is asked for with ``scope="function"``: a
    client would be told of what a failing commit then takes back. A stream must not work on it any more.
    """
    manager = asynccontextmanager(make)
    if not ENDS:

        async def until_later(request: Request) -> AsyncIterator[Any]:
            if (handed := handed_over(request.scope)) is not None:
                yield handed
                return
            async with manager() as own:
                yield own

        return until_later

    async def connection(request: Request) -> Any:
        if (handed := handed_over(request.scope)) is not None:
            return handed
        stack: AsyncExitStack = request.scope["fastapi_function_astack"]
        return await stack.enter_async_context(manager())

    return connection


def _marker(dependencies: Sequence[DependsParameter]) -> Keyed | None:
    found = [each.dependency for each in dependencies if isinstance(each.dependency, Keyed)]
    if len(found) > 1:
        raise Misuse(TWICE)
    return found[0] if found else None


class IdempotentRoute(APIRoute):
    """A route that is keyed when it carries the marker ``once.keyed()``, and a plain one otherwise."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        dependencies = options.get("dependencies") or ()
        marker = _marker(dependencies)
        # Older FastAPI makes a route anew, from the endpoint of another, when a router is included.
        keyed: Keyed | None = getattr(endpoint, KEYED, None)
        if keyed is not None and marker is not None and keyed is not marker:
            raise Misuse(TWICE)
        self.keyed = keyed or marker
        if marker is not None:
            # All that the marker does as a dependency is to ask for the edge, which is this route.
            options["dependencies"] = [each for each in dependencies if each.dependency is not marker]
        if marker is not None and keyed is None:
            policy = marker.policy
            methods = {method.upper() for method in options.get("methods") or ("GET",)}
            if not methods & policy.methods and methods & {"POST", "PUT", "PATCH", "DELETE"}:
                raise Misuse(
                    f"{', '.join(sorted(methods))} {path} is marked as keyed, and keys count on "
                    f"{', '.join(sorted(policy.methods))} only: once.keyed(methods={methods!r}), or no marker"
                )
            endpoint = _claiming(endpoint, marker)
            describe(options, policy)
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.keyed is None:
            await super().handle(scope, receive, send)
            return
        route = _template(self, scope)
        await self.keyed.once.serve(super().handle, self.keyed.policy, route, scope, receive, send)


def _template(route: APIRoute, scope: Scope) -> str:
    """The path as it is declared, with the prefixes of routers and mounts."""
    # Where FastAPI no longer copies the routes of a router that is included.
    included = scope.get("fastapi", {}).get("effective_route_context")
    below = scope.get("root_path", "").removeprefix(scope.get("app_root_path", ""))
    path: str = below + (getattr(included, "path_format", "") or route.path_format)
    return path


def _layers(endpoint: Any) -> Iterator[Any]:
    """The endpoint, and what is below its decorators, partials and instances."""
    yield endpoint
    if isinstance(endpoint, functools.partial):
        yield from _layers(endpoint.func)
    elif hasattr(endpoint, "__wrapped__"):
        yield from _layers(endpoint.__wrapped__)
    elif not inspect.isroutine(endpoint) and not inspect.isclass(endpoint):
        yield from _layers(endpoint.__call__)


def _typed(endpoint: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(endpoint, eval_str=True)
    except NameError:  # a name that only type checkers import: FastAPI makes of it what it can
        returns = inspect.signature(endpoint).return_annotation
        return get_typed_signature(endpoint).replace(return_annotation=returns)


def _depends_on(parameter: inspect.Parameter, dependency: Callable[..., Any]) -> bool:
    marks = (*getattr(parameter.annotation, "__metadata__", ()), parameter.default)
    return any(type(mark) is DependsParameter and mark.dependency is dependency for mark in marks)


def _claiming(endpoint: Callable[..., Any], keyed: Keyed) -> Callable[..., Any]:
    """The endpoint, called inside the claim. Its signature asks for account and connection too."""
    layers = list(_layers(endpoint))
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in layers):
        raise Misuse(
            f"{getattr(endpoint, '__qualname__', endpoint)} is a generator and would still be working after "
            "its answer was committed: do the work first, then return a StreamingResponse"
        )
    is_async = any(map(inspect.iscoroutinefunction, layers))

    @functools.wraps(endpoint)
    async def claimed(**values: Any) -> Any:
        account = values[account_in] if account_in else values.pop(ACCOUNT)
        connection = values[connection_in] if connection_in else values.pop(CONNECTION)
        conducted: Conducted | None = connection.scope.get(SCOPE_KEY)
        call = functools.partial(endpoint, **values)
        if not is_async:
            call = functools.partial(run_in_threadpool, call)
        if conducted is None:
            if connection.scope.get("method") in keyed.policy.methods:
                _ = conducted_in(connection.scope)  # no edge: refuses, whoever made this route anew
            return await call()
        return await claim_and_call(conducted, account, call, is_async)

    signature = _typed(endpoint)
    theirs = list(signature.parameters.values())
    # What they ask for is not asked again: solving a dependency is most of what FastAPI costs, and of a
    # connection it fills one parameter only.
    account_in = next((each.name for each in theirs if _depends_on(each, keyed.once.account)), None)
    connection_in = next((each.name for each in theirs if each.annotation is HTTPConnection), None)
    asks: dict[str, Any] = {}
    if account_in is None:
        asks[ACCOUNT] = Annotated[Any, Depends(keyed.once.account)]
    if connection_in is None:
        asks[CONNECTION] = HTTPConnection
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
        for name, annotation in asks.items()
    ]
    at = len(theirs) - any(each.kind is inspect.Parameter.VAR_KEYWORD for each in theirs)
    setattr(claimed, "__signature__", signature.replace(parameters=[*theirs[:at], *ours, *theirs[at:]]))  # noqa: B010
    setattr(claimed, KEYED, keyed)
    return claimed
