"""Processes and servers that are killed at the worst moments: nobody is charged twice, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import threading
from collections.abc import Iterator

import httpx2
import pytest

from services import PrivatePostgres
from tests.fix_postgres import _new_database, _server
from tests.http.kill_app import POINTS, STACKS
from tests.http.serving import started
from tests.http.shop import SQLITE, Shop, assert_invariants, postgres_query, postgres_tables, sqlite_shop

pytestmark = pytest.mark.crash


class Service:
    """The application of kill_app under a real uvicorn, in a process of its own."""

    def __init__(self, stack: str, address: str, point: str | None = None) -> None:
        arguments = [stack, address, *([point] if point else [])]
        self.port, self.process = started("tests.http.kill_app", *arguments)
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def charge(self, key: str = "k", timeout: float = 30) -> httpx2.Response:
        return httpx2.post(
            f"http://127.0.0.1:{self.port}/charges",
            json={"cents": 100},
            headers={"Idempotency-Key": key},
            timeout=timeout,
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.output.close()


@contextlib.contextmanager
def service(stack: str, address: str, point: str | None = None) -> Iterator[Service]:
    made = Service(stack, address, point)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module", params=STACKS)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    if request.param in SQLITE:
        yield sqlite_shop(tmp_path_factory.mktemp("shop"), request.param)
        return
    with _new_database(_server()) as url:
        postgres_tables(url)
        yield Shop(request.param, None, postgres_query(url), url)


@pytest.fixture(scope="module")
def next_service(shop: Shop) -> Iterator[Service]:
    """The one that is there when another was killed."""
    with service(shop.kind, shop.address) as made:
        yield made


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_claim_work_commit_and_reply(shop: Shop, point: str, next_service: Service) -> None:
    with service(shop.kind, shop.address, point) as first:
        answers: list[httpx2.Response] = []

        def charge() -> None:
            with contextlib.suppress(httpx2.HTTPError):
                answers.append(first.charge(point))

        client = threading.Thread(target=charge)
        client.start()
        while first.output.readline().strip() != "stopped":
            assert first.process.poll() is None
        first.kill()
        client.join()
    done = point in ("committed", "replying")
    assert shop.charges(point) == int(done)
    assert shop.records().get(point) == (201 if done else None)
    if point != "replying":
        assert answers == [], "the first byte leaves after the commit, and not before"
    answer = next_service.charge(point)
    assert answer.status_code == 201
    assert (answer.headers.get("Idempotent-Replayed") == "true") is done
    assert next_service.charge(point).headers["Idempotent-Replayed"] == "true"
    assert shop.charges(point) == 1
    shop.check()


def test_the_server_is_asked_to_end_while_it_works(shop: Shop) -> None:
    """SIGTERM: what is under way is answered and saved."""
    with service(shop.kind, shop.address) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            head = "POST /charges HTTP/1.1\r\nHost: x\r\nIdempotency-Key: term\r\nContent-Length: 2\r\n\r\n{"
            client.sendall(head.encode())
            assert running.charge("other").status_code == 201  # so the first one is under way too
            running.process.send_signal(signal.SIGTERM)
            client.sendall(b"}")
            assert client.recv(1000).startswith(b"HTTP/1.1 201")
        assert running.process.wait(20) in (0, -signal.SIGTERM)
    assert shop.records()["term"] == 201
    shop.check()


@pytest.mark.parametrize("stack", ["psycopg", "asyncpg"])
async def test_postgresql_killed_under_load(own_postgres: PrivatePostgres, stack: str) -> None:
    """Two services, many clients, a server that is killed again and again: then the books are read."""
    with _new_database(own_postgres.start().url) as address:
        await check_under_load(own_postgres, stack, address)


async def check_under_load(own_postgres: PrivatePostgres, stack: str, address: str) -> None:
    postgres_tables(address)
    chance = random.Random(stack)
    keys = [f"k{number}" for number in range(40)]
    told: dict[str, set[bytes]] = {key: set() for key in keys}
    stopping = asyncio.Event()
    seen: dict[int, int] = {}

    async def client(ports: list[int]) -> None:
        async with httpx2.AsyncClient(timeout=20) as http:
            while not stopping.is_set():
                key = chance.choice(keys)
                status, body = await charge(http, chance.choice(ports), key)
                seen[status] = seen.get(status, 0) + 1
                if status == 201:
                    told[key].add(body)

    with service(stack, address) as one, service(stack, address) as two:
        ports = [one.port, two.port]
        drain = [threading.Thread(target=each.output.read, daemon=True) for each in (one, two)]
        for thread in drain:
            thread.start()
        clients = [asyncio.create_task(client(ports)) for _ in range(12)]
        for _ in range(3):
            before = sum(seen.values())
            while sum(seen.values()) < before + 60:
                done, _ = await asyncio.wait(clients, timeout=0.01)
                for each in done:
                    each.result()
            await asyncio.to_thread(own_postgres.kill)
            await asyncio.to_thread(own_postgres.start)
            keys.extend(f"k{number}" for number in range(len(keys), len(keys) + 40))
            told.update({key: told.get(key, set()) for key in keys})
        stopping.set()
        await asyncio.gather(*clients)
        async with httpx2.AsyncClient(timeout=20) as http:
            for key in keys:
                while (last := await charge(http, one.port, key))[0] != 201:
                    pass
                told[key].add(last[1])
    assert set(seen) <= {201, 409, 500, 503}, seen  # 500: a statement of the handler's own failed
    query = postgres_query(address)
    assert_invariants(query)
    assert query("SELECT count(*) FROM charges") == [(len(keys),)]
    assert {len(bodies) for bodies in told.values()} == {1}, "two answers to one key"


async def charge(http: httpx2.AsyncClient, port: int, key: str) -> tuple[int, bytes]:
    # A connection of its own: the server may end an idle one at the moment when it is used again, and after
    # a 500 it does, which would look like an answer that was lost.
    headers = {"Idempotency-Key": key, "Connection": "close"}
    answer = await http.post(f"http://127.0.0.1:{port}/charges", json={"cents": 100}, headers=headers)
    return answer.status_code, answer.content
