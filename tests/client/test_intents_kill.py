"""kill -9 at every point of an attempt, and four processes at once, against a real service: one effect."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import psycopg
import pytest

from taptwice.core.plan import run
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.flows.migrate import migrate
from tests.http import serving
from tests.http.shop import sqlite_shop

pytestmark = pytest.mark.crash

ROOT = pathlib.Path(__file__).resolve().parents[2]

DONE = {"status": 201, "stored": False, "replayed": False}
REPLAYED = {**DONE, "replayed": True}
STORED = {**DONE, "stored": True}


def started(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.client.{module}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def told(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "it has ended"
    return line


class Service:
    """The service, and what was charged."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.shop = sqlite_shop(folder, "sqlite3")
        port, self.process = serving.started("tests.client.intents_service", self.shop.address)
        self.url = f"http://127.0.0.1:{port}"

    def tell(self, path: str) -> None:
        assert httpx2.post(self.url + path).status_code == 204

    def keys(self, order: str) -> list[str]:
        """That it saw with an order, attempt by attempt."""
        seen: dict[str, list[str]] = httpx2.get(self.url + "/seen").json()
        return seen.get(order, [])

    def effects(self, order: str) -> int:
        return sum(self.shop.charges(key) for key in set(self.keys(order)))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("service"))
    yield made
    ended(made.process)
    made.shop.check()


@pytest.fixture(params=["file", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "file":
        return str(tmp_path / "intents.db")
    url: str = request.getfixturevalue("fresh_postgres")
    source = psycopg_driver.connecting(lambda: psycopg.connect(url))
    _ = run(migrate("postgresql"), source.open().execute)
    return url


class Client:
    """Runs of a program that has an order charged."""

    def __init__(self, service: Service, store: str, order: str) -> None:
        self.service = service
        self.store = store
        self.order = order

    def start(self, *point: str, cents: int = 700) -> subprocess.Popen[str]:
        return started("intents_child", self.store, self.service.url, self.order, str(cents), *point)

    def run(self, cents: int = 700) -> dict[str, Any]:
        return self.outcome(self.start(cents=cents))

    def outcome(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        try:
            while (line := told(process)) == "in progress":
                pass
            found: dict[str, Any] = json.loads(line)
        finally:
            ended(process)
        if found.get("status") == 201:
            assert found.pop("body") == {"charged": self.order}
        return found

    def check_is_done(self, again: dict[str, Any]) -> None:
        """What whoever asks again gets; another body is refused before the server hears of it."""
        assert self.run() == again
        attempts = self.service.keys(self.order)
        assert self.run(cents=701) == {"refused": "IntentChanged"}
        assert self.service.keys(self.order) == attempts
        assert len(set(attempts)) == 1
        assert self.service.effects(self.order) == 1


@pytest.mark.parametrize(
    ("point", "effects", "second", "third"),
    [
        ("begun", 0, DONE, STORED),
        ("remembered", 0, DONE, STORED),
        ("answered", 1, REPLAYED, REPLAYED),
        ("settled", 1, STORED, STORED),
    ],
)
def test_killed_at_a_point_of_its_own(
    service: Service,
    store: str,
    point: str,
    effects: int,
    second: dict[str, Any],
    third: dict[str, Any],
    request: Any,
) -> None:
    """The server's replay says ``no-store``: then its status is remembered, and the server is asked again."""
    client = Client(service, store, request.node.name)
    first = client.start(point)
    assert told(first) == "stopped"
    ended(first)
    assert service.effects(client.order) == effects
    assert client.run() == second
    client.check_is_done(third)


def test_killed_in_flight_and_run_again_while_the_server_still_works(
    service: Service, store: str, request: Any
) -> None:
    client = Client(service, store, request.node.name)
    service.tell("/hold/working")
    first = client.start()
    assert told(service.process) == "working"
    ended(first)
    second = client.start()
    assert told(second) == "in progress", "the server's answer is the lock"
    service.tell("/go")
    assert client.outcome(second) == REPLAYED
    client.check_is_done(REPLAYED)


def test_killed_when_the_server_has_committed_and_never_answers(
    service: Service, tmp_path: pathlib.Path, request: Any
) -> None:
    """T30, D-310."""
    client = Client(service, str(tmp_path / "intents.db"), request.node.name)
    service.tell("/hold/answering")
    first = client.start()
    assert told(service.process) == "answering"
    ended(first)
    assert service.effects(client.order) == 1
    assert client.run() == REPLAYED
    client.check_is_done(REPLAYED)
    service.tell("/go")


def test_four_processes_at_once(service: Service, store: str, request: Any) -> None:
    """One works while the three others are told that it does; all get its answer."""
    client = Client(service, store, request.node.name)
    service.tell("/hold/working")
    processes = [client.start() for _ in range(4)]
    assert told(service.process) == "working"
    while len(set(service.keys(client.order))) != 1 or len(service.keys(client.order)) < 4:
        threading.Event().wait(0.05)
    service.tell("/go")
    outcomes = [client.outcome(process) for process in processes]
    assert all(outcome["status"] == 201 for outcome in outcomes)
    assert outcomes.count(DONE) == 1
    assert client.run() in (STORED, REPLAYED), "whichever answer was the first to be kept"
    assert len(set(service.keys(client.order))) == service.effects(client.order) == 1
