"""Which routes are keyed, how their endpoints may look, and what is refused where it is written."""

# ruff: noqa: B008 - a dependency as a default is how FastAPI spells what only this function knows

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Query, Request, Response, WebSocket
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

from taptwice.errors import Misuse
from taptwice.http.fastapi import Idempotency, IdempotentRoute
from tests.http.fastapi_stacks import ChargeIn, Client, Stack, Work, account, on, problem, replayed

if TYPE_CHECKING:
    from decimal import Decimal  # a name that only type checkers know

HERE = on("sqlite-sqlalchemy-async")


class Labelled(BaseModel):
    label: str


class Site:
    """Routes under a keyed router, and what they were called with."""

    def __init__(self, stack: Stack, **settings: Any) -> None:
        self.once = stack.once(**settings)
        self.router = APIRouter(route_class=IdempotentRoute)
        self.app = FastAPI()

    def keyed(self, path: str, endpoint: Any, **options: Any) -> None:
        options.setdefault("dependencies", [self.once.keyed()])
        self.router.post(path, **options)(endpoint)

    def client(self, **include: Any) -> Client:
        self.app.include_router(self.router, **include)
        return Client(self.app)


async def twice(client: Client, path: str = "/x", **options: Any) -> tuple[Any, Any]:
    """The same request two times, under one key."""
    options["headers"] = {"idempotency-key": "key-1", **options.get("headers", {})}
    return await client.post(path, **options), await client.post(path, **options)


# --- endpoints of every look --------------------------------------------------------------------------------


async def with_request(request: Request, body: ChargeIn) -> Any:
    return [request.url.path, body.amount, len(await request.body())]


async def without_anything() -> Any:
    return "nothing"


async def defaults(body: ChargeIn, page: int = 3, tags: Annotated[list[str] | None, Query()] = None) -> Any:
    return [body.amount, page, tags]


async def keyword_only(*, body: ChargeIn, page: int) -> Any:
    return [body.amount, page]


async def response_and_tasks(body: ChargeIn, response: Response, tasks: BackgroundTasks) -> Any:
    response.headers["x-own"] = "1"
    tasks.add_task(int)
    return body


async def nested_models(first: ChargeIn, second: Labelled) -> Labelled:
    return Labelled(label=f"{first.amount}{second.label}")


def blocking(body: ChargeIn, request: Request) -> Any:
    return [body.amount, request.method]


class Callable_:
    async def __call__(self, body: ChargeIn) -> Any:
        return body.amount


class BlockingCallable:
    def __call__(self, body: ChargeIn) -> Any:
        return body.amount


def decorated(endpoint: Any) -> Any:
    @functools.wraps(endpoint)
    def wrapper(*arguments: Any, **values: Any) -> Any:
        return endpoint(*arguments, **values)

    return wrapper


async def partly(body: ChargeIn, extra: int) -> Any:
    return [body.amount, extra]


async def typed_for_checkers_only(body: ChargeIn) -> Decimal:
    return body.amount  # type: ignore[return-value]


BODY: dict[str, Any] = {"json": {"amount": 7}}
LOOKS: list[tuple[Any, dict[str, Any], Any]] = [
    (with_request, BODY, ["/x", 7, 12]),
    (without_anything, {}, "nothing"),
    (defaults, BODY, [7, 3, None]),
    (defaults, {**BODY, "params": {"page": 4, "tags": ["a", "b"]}}, [7, 4, ["a", "b"]]),
    (keyword_only, {**BODY, "params": {"page": 4}}, [7, 4]),
    (response_and_tasks, BODY, {"amount": 7}),
    (nested_models, {"json": {"first": {"amount": 7}, "second": {"label": "b"}}}, {"label": "7b"}),
    (blocking, BODY, [7, "POST"]),
    (Callable_(), BODY, 7),
    (BlockingCallable(), BODY, 7),
    (decorated(defaults), BODY, [7, 3, None]),
    (decorated(blocking), BODY, [7, "POST"]),
    (functools.partial(partly, extra=2), BODY, [7, 2]),
]


@HERE
@pytest.mark.parametrize(("endpoint", "request_", "expected"), LOOKS)
async def test_endpoints_of_every_look(stack: Stack, endpoint: Any, request_: Any, expected: Any) -> None:
    site = Site(stack)
    site.keyed("/x", endpoint)
    async with site.client() as client:
        first, again = await twice(client, **request_)
    assert (first.status_code, first.json()) == (200, expected)
    assert replayed(again)
    assert again.content == first.content


@HERE
async def test_a_return_type_that_only_type_checkers_know(stack: Stack) -> None:
    site = Site(stack)
    site.keyed("/x", typed_for_checkers_only, response_model=None)
    async with site.client() as client:
        assert (await twice(client, **BODY))[1].json() == 7


@HERE
async def test_positional_only_parameters_are_fastapis_affair(stack: Stack) -> None:
    """It calls endpoints by keyword; keyed or not, that fails, and uses up no key."""

    async def positional(body: ChargeIn, /) -> int:
        return body.amount

    site = Site(stack)
    site.keyed("/x", positional)
    site.router.post("/plain")(positional)
    async with site.client() as client:
        assert (await client.post("/plain", **BODY)).status_code == 500
        assert (await twice(client, **BODY))[0].status_code == 500
    assert stack.saved() == []


@HERE
async def test_generators_are_refused_where_they_are_written(stack: Stack) -> None:
    async def events() -> AsyncIterator[int]:
        yield 1

    def lines() -> Any:
        yield 1

    for endpoint in (events, lines):
        with pytest.raises(Misuse, match=f"{endpoint.__name__} is a generator"):
            Site(stack).keyed("/x", endpoint)


# --- where the marker stands --------------------------------------------------------------------------------


@HERE
async def test_a_marker_without_the_route_class_is_loud(stack: Stack) -> None:
    app = FastAPI()
    app.post("/x", dependencies=[stack.once().keyed()])(without_anything)
    with pytest.raises(Misuse, match="route_class=IdempotentRoute"):
        async with Client(app) as client:
            client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
            await client.post("/x", headers={"idempotency-key": "key-1"})


@HERE
async def test_a_second_marker_is_refused(stack: Stack) -> None:
    site = Site(stack)
    with pytest.raises(Misuse, match="twice"):
        site.keyed("/x", without_anything, dependencies=[site.once.keyed(), site.once.keyed(wait=0)])
    site.keyed("/x", without_anything)
    app = FastAPI()
    try:
        app.include_router(site.router, dependencies=[site.once.keyed(wait=0)])
    except Misuse:  # older FastAPI makes the routes anew
        return
    async with Client(app) as client:
        assert (await twice(client))[0].status_code == 500
    assert stack.saved() == []


@HERE
async def test_a_keyed_route_whose_method_takes_no_key_is_refused(stack: Stack) -> None:
    site = Site(stack)
    with pytest.raises(Misuse, match="methods="):
        site.router.put("/x", dependencies=[site.once.keyed()])(without_anything)
    site.router.put("/x", dependencies=[site.once.keyed(methods={"PUT"})])(without_anything)
    async with site.client() as client:
        assert (await client.put("/x")).status_code == 400
        assert not replayed(await client.put("/x", headers={"idempotency-key": "key-1"}))
        assert replayed(await client.put("/x", headers={"idempotency-key": "key-1"}))


@HERE
async def test_a_marker_on_the_router(stack: Stack) -> None:
    once = stack.once()
    router = APIRouter(route_class=IdempotentRoute, dependencies=[once.keyed()])
    router.post("/x")(without_anything)
    router.get("/x")(without_anything)
    app = FastAPI()
    app.include_router(router)
    async with Client(app) as client:
        assert (await client.get("/x")).status_code == 200
        assert problem(await client.post("/x")) == "key-missing"
        assert replayed((await twice(client))[1])


@HERE
async def test_neighbours_are_untouched(stack: Stack) -> None:
    site = Site(stack)
    site.keyed("/x", without_anything)
    site.router.get("/x")(without_anything)
    site.router.post("/plain")(without_anything)

    @site.router.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await websocket.accept()

    async with site.client() as client:
        key = {"idempotency-key": "key-1"}
        for _ in range(2):
            assert not replayed(await client.get("/x", headers=key))
            assert not replayed(await client.post("/plain", headers=key))
        assert (await client.delete("/x", headers=key)).status_code == 405
        assert (await client.options("/x")).status_code == 405
        assert (await client.post("/nowhere", headers=key)).status_code == 404
    assert stack.saved() == []


@HERE
@pytest.mark.parametrize("scope", ["account", "route"])
async def test_prefixes_inclusion_twice_and_mounts(stack: Stack, scope: Any) -> None:
    """One router at three places: with "account" a key belongs to one of them, with "route" to each."""
    site = Site(stack)
    site.keyed("/items/{item}", lambda item: item, dependencies=[site.once.keyed(scope=scope)])
    outer = APIRouter(prefix="/outer")
    outer.include_router(site.router, prefix="/inner")
    app, sub = FastAPI(), FastAPI()
    app.include_router(outer)
    app.include_router(site.router, prefix="/v2")
    sub.include_router(site.router)
    app.mount("/sub", sub)
    async with Client(app) as client:
        for n, place in enumerate(("/outer/inner", "/v2", "/sub")):
            first, again = await twice(client, f"{place}/items/a")
            if scope == "account" and n:
                assert (first.status_code, problem(first)) == (422, "key-reused")
            else:
                assert (first.status_code, first.json(), replayed(again)) == (200, "a", True)
    routes = list(dict.fromkeys(event.route for event in stack.events))
    assert routes == ["POST /outer/inner/items/{item}", "POST /v2/items/{item}", "POST /sub/items/{item}"]


# --- logins -------------------------------------------------------------------------------------------------


@HERE
async def test_security_schemes_and_sub_dependencies(stack: Stack) -> None:
    bearer = HTTPBearer()

    def token(credentials: HTTPAuthorizationCredentials = Depends(bearer)) -> str:
        return credentials.credentials

    class Who:
        def __call__(self, token: str = Depends(token)) -> str:  # blocking, and below another dependency
            return f"acct_{token}"

    site = Site(stack, account=Who())
    site.keyed("/x", without_anything)
    async with site.client() as client:
        assert (await twice(client, headers={"authorization": "none"}))[0].status_code in (401, 403)
        first, again = await twice(client, headers={"authorization": "Bearer t1"})
        other = (await twice(client, headers={"authorization": "Bearer t2"}))[0]
        app_schema = site.app.openapi()
    assert (first.status_code, replayed(again), replayed(other)) == (200, True, False)
    assert "HTTPBearer" in app_schema["components"]["securitySchemes"]
    assert stack.rows("SELECT account FROM taptwice_records ORDER BY account") == ["acct_t1", "acct_t2"]


@HERE
async def test_dependency_overrides(stack: Stack) -> None:
    site = Site(stack)
    site.keyed("/x", without_anything)
    site.app.dependency_overrides[account] = lambda: "acct_9"
    async with site.client() as client:
        assert (await twice(client))[0].status_code == 200
    assert stack.rows("SELECT account FROM taptwice_records") == ["acct_9"]


@HERE
async def test_nobody_logged_in(stack: Stack) -> None:
    site = Site(stack, account=lambda: None)
    site.keyed("/refuses", without_anything)
    site.keyed("/shares", without_anything, dependencies=[site.once.keyed(anonymous="shared-uuid")])
    async with site.client() as client:
        refused = (await twice(client, "/refuses"))[0]
        assert (refused.status_code, problem(refused)) == (401, "account-missing")
        weak = (await twice(client, "/shares"))[0]
        assert (weak.status_code, problem(weak)) == (400, "key-invalid")
        uuid = {"idempotency-key": "0192f0c1-2345-4abc-8def-0123456789ab"}
        assert replayed((await twice(client, "/shares", headers=uuid))[1])


@HERE
async def test_an_account_that_is_no_text_is_misuse(stack: Stack) -> None:
    site = Site(stack, account=lambda: 42)
    site.keyed("/x", without_anything)
    with pytest.raises(Misuse, match="account must give text"):
        async with site.client() as client:
            client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
            await twice(client)


@HERE
async def test_the_connection_too_early_and_too_late(stack: Stack) -> None:
    """A login that wants the claim's connection, and a task that kept it."""
    once = Idempotency(stack.engine, account=account)
    kept: list[Any] = []

    async def early(db: Annotated[Any, Depends(once.connection)]) -> None:
        with pytest.raises(Misuse, match="before the claim"):
            _ = db.execute

    async def endpoint(db: Annotated[Any, Depends(once.connection)]) -> None:
        kept.append(db)
        assert db.execute

    endpoint.__annotations__["db"] = early.__annotations__["db"] = Annotated[Any, Depends(once.connection)]
    router = APIRouter(route_class=IdempotentRoute)
    router.post("/x", dependencies=[once.keyed(), Depends(early)])(endpoint)
    app = FastAPI()
    app.include_router(router)
    async with Client(app) as client:
        assert (await twice(client))[0].status_code == 200
    with pytest.raises(Misuse, match="after the answer"):
        _ = kept[0].execute


@HERE
async def test_one_session_dependency_needs_a_session_maker(stack: Stack) -> None:
    once = Idempotency(stack.engine, account=account)

    async def endpoint(work: Any = Depends(once.session)) -> None:
        raise AssertionError

    router = APIRouter(route_class=IdempotentRoute)
    router.post("/x", dependencies=[once.keyed()])(endpoint)
    app = FastAPI()
    app.include_router(router)
    with pytest.raises(Misuse, match="session maker"):
        async with Client(app) as client:
            client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
            await twice(client)


@on("sqlalchemy-asyncpg")
async def test_a_keyed_call_inside_a_keyed_handler(stack: Stack) -> None:
    """An application that calls itself in-process: each call has a claim of its own."""
    site = Site(stack)

    async def inner(db: Any = Depends(site.once.session)) -> Any:
        return await Work(db).insert(1)

    async def outer(db: Any = Depends(site.once.session)) -> Any:
        async with Client(site.app) as client:
            found = (await client.post("/inner", headers={"idempotency-key": "key-of-inner"})).json()
        return [found, await Work(db).insert(2)]

    site.keyed("/inner", inner)
    site.keyed("/outer", outer)
    async with site.client() as client, asyncio.timeout(30):
        first, again = await twice(client, "/outer")
    assert first.json() == again.json() == [1, 2]
    assert replayed(again)
    assert (stack.rows(), stack.saved()) == ([1, 2], [200, 200])
