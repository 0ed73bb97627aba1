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
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.params import Depends as DependsParameter
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from taptwice.core.policy import Policy, changed
from taptwice.errors import Misuse
from taptwice.http.asgi import SCOPE_KEY, AsgiSettings, Conducted, conducted_in
from taptwice.http.exchange import NotSaved
from taptwice.http.openapi import describe
from taptwice.http.starlette import claim_and_call, connections, sessions

__all__ = ["Idempotency", "IdempotentRoute", "NotSaved"]

ACCOUNT = "taptwice_account"
EXCHANGE = "taptwice_exchange"


class Keyed:
    """The marker of a keyed route, and its policy. As a dependency it only checks that an edge is there."""

    def __init__(self, once: Idempotency, policy: Policy) -> None:
        self.once = once
        self.policy = policy

    def __call__(self, request: Request) -> None:
        if request.method in self.policy.methods:
            conducted_in(request.scope)


class Idempotency(AsgiSettings):
    """Idempotency for FastAPI.

    `account` is a dependency: it runs, and refuses, before anything is replayed. It gives text, or None for
    nobody. The other arguments are those of `AsgiSettings` and `Settings`.
    """

    def __init__(self, origin: Any, *, account: Callable[..., Any], **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.account = account
        self.session = sessions(self)
        """Dependency: a session; inside a keyed handler it works in the claim's transaction."""
        self.connection = connections(self)
        """Dependency: a connection of the driver; inside a keyed handler the claim's own."""

    def keyed(self, **changes: Any) -> Any:
        """The marker of a keyed route, for ``dependencies=[…]``; its settings are those of `Policy`."""
        return Depends(Keyed(self, changed(self.policy, **changes)))


def _marker(dependencies: Sequence[DependsParameter]) -> Keyed | None:
    found = [each.dependency for each in dependencies if isinstance(each.dependency, Keyed)]
    if len(found) > 1:
        raise Misuse("this route is marked as keyed twice: one route, one marker")
    return found[0] if found else None


class IdempotentRoute(APIRoute):
    """A route that is keyed when it carries the marker ``once.keyed()``, and a plain one otherwise."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.keyed = _marker(options.get("dependencies") or ())
        if self.keyed is not None:
            endpoint = _claiming(endpoint, self.keyed)
            describe(options, self.keyed.policy)
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.keyed is None:
            await super().handle(scope, receive, send)
            return
        await self.keyed.once.serve(super().handle, self.keyed.policy, self.path, scope, receive, send)


async def _exchange(request: Request) -> Conducted | None:
    found: Conducted | None = request.scope.get(SCOPE_KEY)
    return found


def _claiming(endpoint: Callable[..., Any], keyed: Keyed) -> Callable[..., Any]:
    """The endpoint, called inside the claim. Its signature asks FastAPI for the account and the exchange as well."""
    if hasattr(endpoint, "__taptwice_wrapped__"):
        return endpoint  # older FastAPI makes a route anew from its endpoint
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        raise Misuse(
            f"{endpoint.__qualname__} is a generator and would still be working after its answer was committed: do the "
            "work first, then return a StreamingResponse"
        )
    is_async = inspect.iscoroutinefunction(endpoint)

    @functools.wraps(endpoint)
    async def claimed(**values: Any) -> Any:
        account, conducted = values.pop(ACCOUNT), values.pop(EXCHANGE)
        call = functools.partial(endpoint, **values) if is_async else functools.partial(_threaded, endpoint, values)
        if conducted is None:  # a method that takes no key
            return await call()
        return await claim_and_call(conducted, account, call)

    signature = inspect.signature(endpoint)
    ours = [
        inspect.Parameter(
            ACCOUNT,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[Any, Depends(keyed.once.account)],
        ),
        inspect.Parameter(EXCHANGE, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[Any, Depends(_exchange)]),
    ]
    theirs = list(signature.parameters.values())
    at = next((i for i, each in enumerate(theirs) if each.kind is inspect.Parameter.VAR_KEYWORD), len(theirs))
    resolved = inspect.signature(endpoint, eval_str=True)
    theirs = [each.replace(annotation=resolved.parameters[each.name].annotation) for each in theirs]
    claimed.__signature__ = resolved.replace(parameters=[*theirs[:at], *ours, *theirs[at:]])  # type: ignore[attr-defined]
    claimed.__taptwice_wrapped__ = True  # type: ignore[attr-defined]
    return claimed


async def _threaded(endpoint: Callable[..., Any], values: dict[str, Any]) -> Any:
    return await run_in_threadpool(endpoint, **values)
