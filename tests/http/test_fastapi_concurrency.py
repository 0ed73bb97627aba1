"""Duplicates at once, few threads and connections, and requests that are cancelled at any moment."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from starlette.middleware.base import BaseHTTPMiddleware

from taptwice.core.plan import Commit
from taptwice.flows.current import current
from taptwice.http.joined import outside
from tests.http.fastapi_stacks import (
    POSTGRES,
    STACKS,
    Client,
    Stack,
    Work,
    drive,
    on,
    problem,
    replayed,
    until,
    work_of_one_row,
)

BLOCKING = ("sqlite-raw", "sqlalchemy-psycopg", "psycopg-sync")


class Door:
    """A handler stops here until the test lets it through, in a thread as on the event loop."""

    def __init__(self) -> None:
        self.came = 0
        self._open = threading.Event()

    async def wait(self, blocking: bool) -> None:
        self.came += 1
        if blocking:
            assert self._open.wait(30)
        else:
            await until(self._open.is_set)

    def open(self) -> None:
        self._open.set()


def behind(stack: Stack, door: Door) -> Callable[[Work], Any]:
    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        await door.wait(stack.blocking)
        return {"id": id_}

    return handler


# --- waiting takes nothing that others need -----------------------------------------------------------------


@on(*BLOCKING)
async def test_duplicates_of_blocking_handlers_with_few_threads(stack: Stack) -> None:
    anyio.to_thread.current_default_thread_limiter().total_tokens = 5
    door = Door()
    async with stack.client(behind(stack, door)) as client:
        waiting = [asyncio.create_task(client.charge()) for _ in range(8)]
        await until(lambda: door.came == 1)
        door.open()
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {201}
    assert sum(map(replayed, answers)) == 7
    assert stack.rows() == [5]


@on(*STACKS)
@pytest.mark.parametrize("processes", [1, 20])
async def test_waiting_duplicates_hold_no_connection(stack: Stack, processes: int) -> None:
    """Whether they wait at the gate of one process or at the claims of many."""
    door = Door()
    clients = [stack.client(behind(stack, door), stack.once()) for _ in range(processes)]
    waiting = [asyncio.create_task(clients[n % processes].charge()) for n in range(20)]
    await until(lambda: door.came == 1)
    for _ in range(30):
        assert (await clients[0].get("/free")).status_code == 200
        await asyncio.sleep(0)
    # Of the five connections one has the claim, and each look of a waiting duplicate is a short one.
    await until(lambda: stack.borrowed() <= 1)
    assert not any(task.done() for task in waiting), "nobody was answered before the holder"
    door.open()
    answers = await asyncio.gather(*waiting)
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id":1}')}
    assert sum(map(replayed, answers)) == 19
    assert (stack.calls, stack.rows()) == (1, [5])


@on("sqlalchemy-asyncpg")
async def test_the_holder_needs_a_second_connection_while_duplicates_wait(
    stack: Stack, charges_postgres: str
) -> None:
    small = Stack(stack.name, charges_postgres, pool_size=2)
    await small.open()
    door = Door()

    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        await door.wait(False)
        with outside():
            async with small.engine.begin() as second:
                await second.execute(text("INSERT INTO charges (amount) VALUES (1)"))
        return {"id": id_}

    clients = [small.client(handler, small.once()) for _ in range(8)]
    waiting = [asyncio.create_task(client.charge()) for client in clients]
    await until(lambda: door.came == 1)
    door.open()
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {201}
    assert sorted(small.rows()) == [1, 5]
    assert small.borrowed() == 0
    await small.close()


@on(*POSTGRES)
async def test_no_wait(stack: Stack) -> None:
    door = Door()
    clients = [stack.client(behind(stack, door), stack.once(), wait=0) for _ in range(2)]
    first = asyncio.create_task(clients[0].charge())
    await until(lambda: door.came == 1)
    for client in clients:  # the same process, and another
        refused = await client.charge()
        assert (refused.status_code, problem(refused)) == (409, "in-progress")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["cache-control"] == "no-store"
    door.open()
    assert (await first).status_code == 201
    assert replayed(await clients[1].charge())


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_wait_that_ends(stack: Stack) -> None:
    door = Door()
    clients = [stack.client(behind(stack, door), stack.once(), wait="50ms", retry_after=7) for _ in range(2)]
    first = asyncio.create_task(clients[0].charge())
    await until(lambda: door.came == 1)
    for client in clients:
        refused = await client.charge()
        assert (refused.status_code, problem(refused)) == (409, "in-progress")
        assert refused.headers["retry-after"] == "7"
    door.open()
    assert (await first).status_code == 201


@on("sqlalchemy-asyncpg", "psycopg-sync", "sqlite-sqlalchemy-async")
async def test_when_the_first_fails_the_next_one_works(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        if stack.calls == 1:
            raise ValueError("boom")
        return {}

    clients = [stack.client(handler, stack.once()) for _ in range(4)]
    answers = await asyncio.gather(*(client.charge() for client in clients for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [201] * 7 + [500]
    assert (stack.calls, stack.rows()) == (2, [5])


@on(*POSTGRES[:2])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_stricter_isolation_levels(stack: Stack, level: str) -> None:
    await stack.open(isolation_level=level)
    served: list[int] = []

    async def handler(work: Work) -> Any:
        served.append(stack.calls)
        return {"id": await work.insert(5)}

    clients = [stack.client(handler, stack.once()) for _ in range(10)]
    answers = await asyncio.gather(*(client.charge() for client in clients for _ in range(2)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum(not replayed(answer) for answer in answers) == 1
    assert stack.rows() == [5]
    assert len(served) <= 20, "at most once a request"


# --- what follows the answer keeps nobody waiting -----------------------------------------------------------


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg", "asyncpg")
async def test_a_retry_during_the_background_task_is_answered(stack: Stack) -> None:
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse

    seen: list[Any] = []
    door = Door()

    async def background() -> None:
        under_way = current.get()
        seen.append((stack.rows(), stack.borrowed(), under_way and under_way.executor))
        await door.wait(False)

    async def handler(work: Work) -> Any:
        return JSONResponse({"id": await work.insert(5)}, background=BackgroundTask(background))

    async with stack.client(handler) as client:
        first = asyncio.create_task(client.charge())
        await until(lambda: door.came == 1)
        assert replayed(await client.charge())
        assert not first.done()
        door.open()
        assert (await first).status_code == 200
    assert seen == [([5], 0, None)]


# --- cancelled requests -------------------------------------------------------------------------------------


class Deadline:
    """What a server or a framework does outside: gives up on the request when told."""

    def __init__(self, app: Any, kind: str) -> None:
        self.app = app
        self.kind = kind
        self.expire: Callable[[], None] = lambda: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self.kind == "asyncio":
                async with asyncio.timeout(None) as deadline:
                    self.expire = lambda: deadline.reschedule(0)
                    await self.app(scope, receive, send)
            else:
                with anyio.CancelScope() as cancelling:
                    self.expire = cancelling.cancel
                    await self.app(scope, receive, send)
                if cancelling.cancelled_caught:
                    raise TimeoutError
        except TimeoutError:
            await send({"type": "http.response.start", "status": 504, "headers": []})
            await send({"type": "http.response.body", "body": b""})


@on()
@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_timeout_outside_during_the_handler(stack: Stack, kind: str) -> None:
    door = Door()
    app = Deadline(stack.app(behind(stack, door)), kind)
    async with Client(app) as client:
        late = asyncio.create_task(client.charge())
        await until(lambda: door.came == 1)
        app.expire()
        if stack.blocking:
            door.open()  # a thread is waited for: it has the connection
        assert (await late).status_code == 504
        await until(lambda: stack.borrowed() == 0)
        assert (stack.rows(), stack.saved()) == ([], [])
        door.open()
        again = await client.charge()
    assert (again.status_code, replayed(again)) == (201, False)
    assert stack.rows() == [5]


@on()
@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_timeout_outside_while_waiting_for_the_key(stack: Stack, kind: str) -> None:
    door = Door()
    holder = stack.client(behind(stack, door), stack.once())
    app = Deadline(stack.app(behind(stack, door), stack.once()), kind)
    first = asyncio.create_task(holder.charge())
    await until(lambda: door.came == 1)
    async with Client(app) as client:
        for pauses in range(6):
            late = asyncio.create_task(client.charge())
            for _ in range(10**pauses if pauses < 3 else 300 * pauses):
                await asyncio.sleep(0)
            app.expire()
            assert (await late).status_code == 504
    await until(lambda: stack.borrowed() <= 1)
    door.open()
    assert (await first).status_code == 201
    assert (stack.calls, stack.rows()) == (1, [5])


@on()
@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_requests_cancelled_at_random_moments(stack: Stack, kind: str) -> None:
    """Work and answers stay together, connections come back, and whoever cancels gets what he asked for."""

    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        if not stack.blocking:
            await asyncio.sleep(0)
        return {"id": id_}

    rng = random.Random(7)
    total = 24 if stack.sqlite else 48
    app = stack.app(handler)
    outcomes: list[int | str] = []

    async def one(client: Client, key: str, patience: float) -> None:
        if kind == "anyio":
            with anyio.move_on_after(patience) as scope:
                outcomes.append((await client.charge(key)).status_code)
            if scope.cancelled_caught:
                outcomes.append("cancelled")
            return
        request = asyncio.create_task(client.charge(key))
        await asyncio.wait([request], timeout=patience)
        request.cancel()
        try:
            outcomes.append((await request).status_code)
        except asyncio.CancelledError:
            outcomes.append("cancelled")

    async with Client(app) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(client.charge(f"warm-{n}") for n in range(8)))
        usual = time.perf_counter() - begun  # so that every moment of a request has its turn
        keys = [f"key-{n}" for n in range(total)]
        for batch in range(0, total, 8):
            await asyncio.gather(
                *(one(client, key, rng.random() * 1.2 * usual) for key in keys[batch : batch + 8])
            )
        await until(lambda: stack.borrowed() == 0)
        # A commit that was under way when its request was cancelled comes to its end.
        await until(lambda: len(stack.rows()) == len(stack.saved()))
        assert set(outcomes) <= {201, "cancelled"}, set(outcomes)
        assert outcomes.count(201) <= len(stack.rows()) - 8
        retried = [await client.charge(key) for key in keys]
        assert {answer.status_code for answer in retried} == {201}
    assert len(stack.rows()) == len(stack.saved()) == total + 8


@on("sqlite-sqlalchemy-async", "sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_base_http_middleware_outside(stack: Stack) -> None:
    app = stack.app(work_of_one_row)

    async def pass_through(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-base"] = "1"
        return response

    app.add_middleware(BaseHTTPMiddleware, dispatch=pass_through)
    async with Client(app) as client:
        answers = await asyncio.gather(*(client.charge() for _ in range(10)))
    assert {(answer.status_code, answer.headers["x-base"]) for answer in answers} == {(201, "1")}
    assert sum(map(replayed, answers)) == 9
    assert stack.rows() == [5]


@on("asyncpg")
async def test_keys_in_bodies_do_not_wait_for_each_other(stack: Stack) -> None:
    both = asyncio.Event()

    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        if stack.calls == 2:
            both.set()
        await both.wait()
        return {"id": id_}

    async with stack.client(handler, key_pointer="/key", wait="0s") as client, asyncio.timeout(20):
        bodies: list[dict[str, Any]] = [{"amount": 5, "key": key} for key in ("a", "b")]
        answers = await asyncio.gather(*(client.post("/charges", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [201, 201]


# --- the control: what everybody writes first ---------------------------------------------------------------


def check_then_insert(stack: Stack, together: int) -> FastAPI:
    """Look for the key, work, save: right for one client at a time. Goes on when so many have looked."""
    app = FastAPI()
    looked = 0

    @app.post("/charges", status_code=201)
    async def charge() -> dict[str, int]:
        nonlocal looked
        async with stack.engine.begin() as connection:
            found = (await connection.execute(text("SELECT id FROM charges WHERE amount = 77"))).scalar()
            looked += 1
            await until(lambda: looked >= together)
            if found is None:
                insert = text("INSERT INTO charges (amount) VALUES (77) RETURNING id")
                found = (await connection.execute(insert)).scalar_one()
            return {"id": found}

    return app


@on("sqlalchemy-asyncpg")
async def test_the_control_passes_in_sequence_and_fails_at_once(stack: Stack) -> None:
    async with Client(check_then_insert(stack, 1)) as client:
        assert len({(await client.charge()).content for _ in range(5)}) == 1
    assert stack.rows() == [77]
    stack.execute("DELETE FROM charges")
    async with Client(check_then_insert(stack, 2)) as client:
        await asyncio.gather(*(client.charge() for _ in range(20)))
    assert len(stack.rows()) > 1, "a test that this passes would prove nothing"


@on("sqlite-sqlalchemy-async", "sqlalchemy-asyncpg", "sqlalchemy-psycopg")
@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_request_cancelled_during_its_commit(stack: Stack, kind: str) -> None:
    """Its dependencies wait with closing the session: else the work would be undone and the answer saved."""
    once = stack.once()
    door = Door()
    original = type(once.source.open()).execute

    def is_end(command: Any) -> bool:
        return any(isinstance(part, Commit) for part in getattr(command, "commands", ()))

    def blocking(executor: Any, command: Any) -> Any:
        if is_end(command):
            drive(door.wait(True))
        return original(executor, command)

    async def awaiting(executor: Any, command: Any) -> Any:
        if is_end(command):
            await door.wait(False)
        return await original(executor, command)

    slow_kind = type(
        "Slow", (type(once.source.open()),), {"execute": blocking if stack.blocking else awaiting}
    )
    open_ = once.source.open

    def slow() -> Any:
        executor = open_()
        executor.__class__ = slow_kind
        return executor

    once.source.open = slow  # type: ignore[method-assign]
    app = Deadline(stack.app(work_of_one_row, once), kind)
    async with Client(app) as client:
        late = asyncio.create_task(client.charge())
        await until(lambda: door.came == 1)
        app.expire()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not late.done()
        door.open()
        await late
        await until(lambda: stack.borrowed() == 0)
        assert (stack.rows(), stack.saved()) == ([5], [201])
        assert replayed(await client.charge())
