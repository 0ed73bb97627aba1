"""Starlette under a real uvicorn: endpoints of all kinds, middleware on both sides, misbehaving clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from taptwice.core.model import Answer
from taptwice.errors import Misuse
from taptwice.events import Event, Outcome
from taptwice.http.request import NotSaved
from taptwice.http.starlette import Idempotency
from tests.http.shop import Shop, call, open_shop, postgres_query, postgres_tables, scope_of, sqlite_shop


class Passing(BaseHTTPMiddleware):
    """Passes the request on, in a task of its own."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["X-Passed"] = "1"
        return response


class Door:
    """Where a handler waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    async def pass_through(self) -> None:
        self.reached.set()
        await asyncio.to_thread(self.open.wait)


class App:
    """All kinds of keyed endpoints, on one shop."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.events: list[Event] = []
        self.door = Door()
        self.after: list[Any] = []
        self.once = once = Idempotency(
            shop.origin, account=self.account, listeners=[self.events.append], show=True
        )

        def key(request: Request) -> str:
            return request.headers["idempotency-key"].strip(' "')

        @once.keyed()
        async def charge(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            return JSONResponse({"body": (await request.body()).decode()}, 201, {"Location": "/charges/1"})

        @once.keyed()
        def sync(request: Request) -> Response:
            shop.insert_now(once.connection(request), key(request))
            return JSONResponse({"thread": True}, 201)

        @once.keyed()
        async def raises(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            raise HTTPException(402, "no money")

        @once.keyed()
        async def crashes(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            raise ZeroDivisionError

        @once.keyed()
        async def refuses(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            raise NotSaved(JSONResponse({"later": True}, 200))

        @once.keyed()
        async def waits(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            await self.door.pass_through()
            return JSONResponse({"waited": True}, 201)

        @once.keyed()
        async def streams(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))

            async def chunks() -> AsyncIterator[bytes]:
                for number in range(3):
                    yield b"%d" % number

            return StreamingResponse(chunks(), 201, {"Location": "/charges/1"}, "text/plain")

        @once.keyed(save_max_body=100)
        async def file(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            return FileResponse(__file__)

        @once.keyed()
        async def later(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))

            def background() -> None:
                self.after.append(shop.charges(key(request)))

            return PlainTextResponse("ok", 201, background=BackgroundTask(background))

        async def parse(request: Request) -> None:
            body = await request.body()
            if not body.startswith(b"{"):
                raise HTTPException(400, "an object, please")
            if b"later" in body:
                raise NotSaved(Answer(503, (("Retry-After", "9"),), b"not now"))

        @once.keyed(parse=parse)
        async def parsed(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            return JSONResponse(json.loads(await request.body()), 201)

        @once.keyed(request_max_body=100)
        async def small(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            return Response(status_code=204)

        @once.keyed()
        async def item(request: Request) -> Response:
            await shop.insert(once.connection(request), key(request))
            return JSONResponse({"item": request.path_params["name"]}, 201)

        class Charges(HTTPEndpoint):
            @once.keyed()
            async def post(self, request: Request) -> Response:
                await shop.insert(once.connection(request), key(request))
                return JSONResponse({"class": True}, 201)

            @once.keyed()
            async def patch(self, request: Request) -> Response:
                await shop.insert(once.connection(request), key(request))
                raise HTTPException(402, "no money")

            async def get(self, request: Request) -> Response:
                return JSONResponse({"got": True})

        async def socket_(websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text("hello")
            await websocket.close()

        edge = [Middleware(once.Edge)]
        endpoints = (charge, sync, raises, crashes, refuses, waits, streams, file, later, parsed, small)
        routes: list[Any] = [
            Route(f"/{each.__name__}", each, methods=["POST"], middleware=edge) for each in endpoints
        ]
        routes += [
            Route("/class", Charges, middleware=edge),
            Route("/inside", charge, methods=["POST"], middleware=[*edge, Middleware(Passing)]),
            Route("/naked", charge, methods=["POST"]),
            Route("/items/{name:path}", item, methods=["POST"], middleware=edge),
            WebSocketRoute("/socket", socket_),
        ]
        app = Starlette(
            routes=[Mount("/mounted", routes=list(routes)), *routes],
            middleware=[Middleware(GZipMiddleware, minimum_size=10), Middleware(Passing)],
        )
        self.asgi: Any = app

    async def account(self, request: Request) -> str | None:
        if request.headers.get("authorization") == "nobody":
            raise HTTPException(401)
        return "acct"


@contextlib.contextmanager
def serving(app: Any, **settings: Any) -> Iterator[int]:
    """A real uvicorn in a thread; gives its port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        config = uvicorn.Config(app, log_config=None, lifespan="off", **settings)
        server = uvicorn.Server(config)
        started = threading.Event()
        startup = server.startup

        async def startup_and_tell(sockets: Any = None) -> None:
            await startup(sockets)
            started.set()

        server.startup = startup_and_tell  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        assert started.wait(30)
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def app(tmp_path: pathlib.Path) -> App:
    return App(sqlite_shop(tmp_path, "sqlite3"))


@pytest.fixture
def client(app: App) -> Iterator[httpx2.Client]:
    with serving(app.asgi) as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as made:
        yield made


def post(client: httpx2.Client, path: str = "/charge", key: str | None = "k", **more: Any) -> httpx2.Response:
    headers = {**({} if key is None else {"Idempotency-Key": key}), **more.pop("headers", {})}
    return client.post(path, headers=headers, **{"json": {"cents": 1}, **more})


def replayed(answer: httpx2.Response) -> bool:
    return answer.headers.get("Idempotent-Replayed") == "true"


# --- endpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/charge", "/sync", "/class", "/inside", "/mounted/charge", "/mounted/sync"]
)
def test_once_and_the_same_answer_again(app: App, client: httpx2.Client, path: str) -> None:
    first, again = post(client, path), post(client, path)
    assert (first.status_code, again.status_code) == (201, 201)
    assert (replayed(first), replayed(again)) == (False, True)
    assert first.content == again.content
    assert first.headers.get("location") == again.headers.get("location")
    assert again.headers["x-passed"] == "1", "what is outside the edge works on a replay too"
    assert app.shop.charges("k") == 1
    app.shop.check()
    outcomes = [(event.outcome, event.route) for event in app.events]
    assert [each for each, _ in outcomes] == [Outcome.NEW, Outcome.FINISHED, Outcome.REPLAYED]
    assert {route for _, route in outcomes} == {f"POST {path.removeprefix('/mounted')}"}


def test_raised_is_undone_and_kept(app: App, client: httpx2.Client) -> None:
    first, again = post(client, "/raises"), post(client, "/raises")
    assert (first.status_code, again.status_code, replayed(again)) == (402, 402, True)
    assert first.content == again.content
    assert (app.shop.charges(), app.shop.records()) == (0, {"k": 402})


def test_raised_in_a_class_is_undone_and_kept_too(app: App, client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "k"}
    first, again = [client.patch("/class", headers=headers, json={}) for _ in range(2)]
    assert (first.status_code, again.status_code, replayed(again)) == (402, 402, True)
    assert first.content == again.content
    assert (app.shop.charges(), app.shop.records()) == (0, {"k": 402})


def test_a_crash_leaves_nothing(app: App, client: httpx2.Client) -> None:
    for _ in range(2):
        # uvicorn closes the connection of a request that failed, and does not say so.
        answer = post(client, "/crashes", headers={"Connection": "close"})
        assert (answer.status_code, replayed(answer)) == (500, False)
    assert (app.shop.charges(), app.shop.records()) == (0, {})


def test_not_saved(app: App, client: httpx2.Client) -> None:
    for _ in range(2):
        answer = post(client, "/refuses")
        assert (answer.status_code, answer.json(), replayed(answer)) == (200, {"later": True}, False)
    assert (app.shop.charges(), app.shop.records()) == (0, {})


def test_parsing_before_the_claim(app: App, client: httpx2.Client) -> None:
    assert post(client, "/parsed", content=b"[]", json=None).status_code == 400
    later = post(client, "/parsed", json={"later": 1})
    assert (later.status_code, later.headers["retry-after"], later.content) == (503, "9", b"not now")
    assert app.shop.records() == {}
    assert post(client, "/parsed").json() == {"cents": 1}
    assert replayed(post(client, "/parsed"))


def test_a_stream_arrives_whole_and_is_not_done_again(app: App, client: httpx2.Client) -> None:
    assert post(client, "/streams").text == "012"
    again = post(client, "/streams")
    assert (again.status_code, again.content, replayed(again)) == (201, b"", True)
    assert (again.headers["idempotent-body"], again.headers["location"]) == ("omitted", "/charges/1")
    assert app.shop.charges("k") == 1


def test_a_file_arrives_whole(app: App, client: httpx2.Client) -> None:
    content = pathlib.Path(__file__).read_bytes()
    assert post(client, "/file").content == content
    assert post(client, "/file").content == b""
    assert app.shop.charges("k") == 1


def test_background_tasks_run_after_the_commit_and_not_again(app: App, client: httpx2.Client) -> None:
    assert post(client, "/later").status_code == 201
    assert replayed(post(client, "/later"))
    assert app.after == [1]


def test_a_login_refuses_a_replay(app: App, client: httpx2.Client) -> None:
    assert post(client).status_code == 201
    assert post(client, headers={"Authorization": "nobody"}).status_code == 401


def test_without_an_edge_it_says_so(app: App) -> None:
    with pytest.raises(Misuse, match="no edge around it"):
        asyncio.run(call(app.asgi, scope_of(path="/naked", headers=[("idempotency-key", "k")])))
    assert app.shop.charges() == 0


def test_compression_outside_suits_each_request(app: App, client: httpx2.Client) -> None:
    first = post(client, headers={"Accept-Encoding": "gzip"})
    again = post(client, headers={"Accept-Encoding": "identity"})
    assert first.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in again.headers
    assert (first.json(), replayed(again)) == (again.json(), True)


def test_sessions(fresh_postgres: str) -> None:
    postgres_tables(fresh_postgres)
    engine = create_engine(fresh_postgres.replace("postgresql://", "postgresql+psycopg://", 1))
    once = Idempotency(sessionmaker(engine), account=lambda request: "acct")

    @once.keyed()
    def charge(request: Request) -> Response:
        with once.session() as session:
            session.execute(text("INSERT INTO charges VALUES ('acct', 'k', 1)"))
            session.commit()
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/charges", charge, methods=["POST"], middleware=[Middleware(once.Edge)])])
    replies = [asyncio.run(call(app)) for _ in range(2)]
    assert [reply.replayed for reply in replies] == [False, True]
    assert postgres_query(fresh_postgres)("SELECT key FROM charges") == [("k",)]
    engine.dispose()


async def test_a_session_without_a_maker(app: App) -> None:
    with pytest.raises(Misuse, match="session maker"):
        async with app.once.session():
            pytest.fail("no maker")


# --- what is not ours ---------------------------------------------------------------------------------------


def test_other_methods_routes_and_protocols(app: App, client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "k"}
    assert client.get("/class", headers=headers).json() == {"got": True}
    assert client.head("/charge", headers=headers).status_code == 405
    assert client.options("/charge", headers=headers).status_code == 405
    assert client.put("/charge", headers=headers).status_code == 405
    assert client.post("/unknown", headers=headers).status_code == 404
    assert app.events == []
    assert app.shop.records() == {}


async def test_a_websocket(app: App) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {**scope_of(path="/socket"), "type": "websocket", "subprotocols": []}
    await app.asgi(scope, receive, send)
    assert sent == ["websocket.accept", "websocket.send", "websocket.close"]


def test_paths_as_they_stand_on_the_wire(app: App, client: httpx2.Client) -> None:
    """Percent-encoding that differs is another request; a mount and a root path change nothing."""
    assert post(client, "/items/a%20b").json() == {"item": "a b"}
    assert replayed(post(client, "/items/a%20b"))
    assert post(client, "/items/a%2520b").status_code == 422
    assert post(client, "/items/a%2Fb", key="k2").json() == {"item": "a/b"}
    assert post(client, "/items/a/b", key="k2").status_code == 422
    assert post(client, "/items/a%20b?x=1").status_code == 422, "the query belongs to it"


def test_behind_a_root_path(app: App) -> None:
    with serving(app.asgi, root_path="/api") as port, httpx2.Client() as client:
        address = f"http://127.0.0.1:{port}/charge"
        assert post(client, address).status_code == 201
        assert replayed(post(client, address))


# --- clients that misbehave ---------------------------------------------------------------------------------

HEAD = b"POST /charge HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


def raw(client: httpx2.Client, *pieces: bytes, half_close: bool = False) -> bytes:
    """Send these bytes as they are; everything that comes back."""
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while received := connection.recv(65536):
            answer += received
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize("lines", [b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n", b"Idempotency-Key:\r\n"])
def test_header_lines_as_they_come(app: App, client: httpx2.Client, lines: bytes) -> None:
    assert status_of(raw(client, HEAD + lines + b"Content-Length: 2\r\n\r\n{}")) == 400
    assert app.shop.records() == {}


def test_spellings_of_one_key(app: App, client: httpx2.Client) -> None:
    for line in (
        b"Idempotency-Key: k",
        b'idempotency-KEY: "k"',
        b"IDEMPOTENCY-KEY:  k  ",
        b'Idempotency-Key: "k";v=1',
    ):
        assert status_of(raw(client, HEAD + line + b"\r\nContent-Length: 2\r\n\r\n{}")) == 201
    assert app.shop.charges() == 1


def test_chunked_and_fixed_are_one_request(app: App, client: httpx2.Client) -> None:
    key = b"Idempotency-Key: k\r\n"
    chunked = HEAD + key + b"Transfer-Encoding: chunked\r\n\r\n"
    first = raw(client, chunked, b"1\r\n{\r\n", b'7\r\n"a": 1}\r\n', b"0\r\n\r\n")
    again = raw(client, HEAD + key + b'Content-Length: 8\r\n\r\n{"a": 1}')
    assert (status_of(first), status_of(again)) == (201, 201)
    assert b"idempotent-replayed: true" in again


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit(app: App, client: httpx2.Client, chunked: bool) -> None:
    head = HEAD.replace(b"/charge", b"/small") + b"Idempotency-Key: k\r\n"
    if chunked:
        body = b"".join(b"32\r\n" + b"x" * 50 + b"\r\n" for _ in range(3))
        answer = raw(client, head + b"Transfer-Encoding: chunked\r\n\r\n", body)
    else:
        answer = raw(client, head + b"Content-Length: 101\r\n\r\n")
    assert status_of(answer) == 413
    assert app.shop.records() == {}
    assert post(client, "/small").status_code == 204


def test_a_client_that_expects_100_continue(app: App, client: httpx2.Client) -> None:
    key = b"Idempotency-Key: k\r\nExpect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 20) as connection:
        connection.sendall(HEAD + key + b"Content-Length: 2\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b"{}")
        assert connection.recv(100).startswith(b"HTTP/1.1 201")
    too_large = raw(client, HEAD.replace(b"/charge", b"/small") + key + b"Content-Length: 101\r\n\r\n")
    assert status_of(too_large) == 413, "and no invitation to send it"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 50\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_a_body_that_breaks_off(app: App, client: httpx2.Client, framing: bytes) -> None:
    for _ in range(3):
        raw(client, HEAD + b"Idempotency-Key: k\r\n" + framing, half_close=True)
    assert (app.shop.charges(), app.shop.records()) == (0, {})
    assert post(client).status_code == 201


def test_a_client_that_leaves_while_the_handler_works(app: App, client: httpx2.Client) -> None:
    """It is finished all the same, and the retry, which waits for it, gets its answer."""
    head = HEAD.replace(b"/charge", b"/waits") + b"Idempotency-Key: k\r\nContent-Length: 11\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", client.base_url.port or 0))
    connection.sendall(head + b'{"cents":1}')
    assert app.door.reached.wait(20)
    connection.close()
    answers: list[httpx2.Response] = []
    retry = threading.Thread(target=lambda: answers.append(post(client, "/waits")))
    retry.start()
    app.door.open.set()
    retry.join()
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [(201, True)]
    assert app.shop.charges("k") == 1


def test_a_client_that_leaves_before_the_first_byte_and_after_the_last(
    app: App, client: httpx2.Client
) -> None:
    head = HEAD + b"Idempotency-Key: k\r\nContent-Length: 11\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
        connection.sendall(head + b'{"cents":1}')  # and gone
    assert post(client).status_code == 201
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
        connection.sendall(head + b'{"cents":1}')
        connection.recv(1)  # and gone
    assert replayed(post(client))
    assert app.shop.charges("k") == 1
    app.shop.check()


def test_many_at_once(app: App, client: httpx2.Client) -> None:
    def visit(number: int) -> None:
        statuses.append(post(client, ["/charge", "/sync"][number % 2], f"k{number % 6}").status_code)

    statuses: list[int] = []
    threads = [threading.Thread(target=visit, args=[number]) for number in range(36)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [201] * 36
    assert app.shop.charges() == 6
    app.shop.check()


# --- cancelled in a thread ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite3", "psycopg", "sqlalchemy"])
async def test_a_cancelled_handler_in_a_thread_ends_before_its_connection_is_given_back(
    kind: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    """A thread cannot be cancelled: what it still does must not reach another request's transaction."""
    async with open_shop(kind, tmp_path, lambda: request.getfixturevalue("fresh_postgres")) as shop:
        once = Idempotency(shop.origin, account=lambda request: "acct")
        reached, let_go = threading.Event(), threading.Event()

        @once.keyed()
        def charge(request: Request) -> Response:
            connection = once.connection(request)
            reached.set()
            assert let_go.wait(20)
            shop.insert_now(connection, "late")
            return JSONResponse({}, 201)

        edge = [Middleware(once.Edge)]
        app = Starlette(routes=[Route("/charges", charge, methods=["POST"], middleware=edge)])
        task = asyncio.create_task(call(app))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        await asyncio.sleep(0)
        let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (shop.charges(), shop.records()) == (0, {})
        assert (await call(app)).status == 201
        assert shop.charges("late") == 1
