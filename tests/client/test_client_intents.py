"""Remembered intents through the clients: bound to a request, answered once, the same after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2
import pytest
import trio

from taptwice.client.http import AsyncClient, Client
from taptwice.client.intents import AsyncIntentStore, IntentStore
from taptwice.client.keys import key_of
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.reports import report
from taptwice.client.testing import ScriptedServer, Step, answer, close, hang, no_wait, problem
from taptwice.errors import IntentChanged, IntentDropped, IntentTooOld, Misuse, TaptwiceError

MADE = answer(201, {"Content-Type": "application/json", "Location": "/charges/1"}, b'{"id": 1}')


class Blocking:
    """The awaiting client behind the blocking one's face, so that both are asked the same."""

    def __init__(self, url: str, path: pathlib.Path, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, intents=AsyncIntentStore(path), **settings)

    def post(self, url: str, **options: Any) -> httpx2.Response:
        async def wait() -> httpx2.Response:
            return await self._client.post(url, **options)

        return self._runner.run(wait())

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


class OnTrio:
    """The same on trio: one loop a call, and a client of its own on it."""

    def __init__(self, url: str, path: pathlib.Path, **settings: Any) -> None:
        self._make = partial(AsyncClient, url, intents=AsyncIntentStore(path), **settings)

    def post(self, url: str, **options: Any) -> httpx2.Response:
        async def main() -> httpx2.Response:
            async with self._make() as client:
                return await client.post(url, **options)

        return trio.run(main)

    def close(self) -> None:
        pass


@pytest.fixture(params=["blocking", "awaiting", "on trio"])
def connect(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Makes clients that remember their intents in one file, each as after a restart."""
    with contextlib.ExitStack() as stack:

        def make(url: str, **settings: Any) -> Any:
            path = tmp_path / "intents.db"
            if request.param == "awaiting":
                client: Any = Blocking(url, path, **settings)
            elif request.param == "on trio":
                client = OnTrio(url, path, **settings)
            else:
                client = Client(url, intents=IntentStore(path), **settings)
            return stack.enter_context(contextlib.closing(client))

        yield make


def keys(server: ScriptedServer) -> list[str | None]:
    return [request.header("Idempotency-Key") for request in server.requests]


def test_after_giving_up_and_a_restart_the_key_is_the_same_and_the_answer_is_kept(connect: Any) -> None:
    script: list[Step] = [close, close, close, close, close, MADE]
    with ScriptedServer(script) as server, no_wait():
        with pytest.raises(httpx2.RemoteProtocolError) as caught:
            connect(server.url).post("/charges", json={"cents": 5}, intent="order-17")
        assert report(caught.value).outcome is Outcome.UNKNOWN
        first = connect(server.url).post("/charges", json={"cents": 5}, intent="order-17")
        again = connect(server.url).post("/charges", json={"cents": 5}, intent="order-17")
        assert (len(server.requests), len(set(keys(server)))) == (6, 1)
        for response in (first, again):
            assert (response.status_code, response.json()) == (201, {"id": 1})
            assert response.headers["Location"] == "/charges/1"
            assert report(response).idempotency_key == keys(server)[0]
        assert report(again).stop_reason is StopReason.REMEMBERED
        assert report(again).attempts == ()


def test_a_changed_body_is_refused_before_sending(connect: Any) -> None:
    with ScriptedServer([MADE]) as server:
        client = connect(server.url)
        client.post("/charges", json={"cents": 5}, intent="order-17")
        for changed in ({"json": {"cents": 6}}, {"json": {"cents": 5}, "params": {"a": 1}}, {}):
            with pytest.raises(IntentChanged):
                client.post("/charges", intent="order-17", **changed)
        client.post("/charges", json={"cents": 6}, intent="order-18")
        assert (len(server.requests), len(set(keys(server)))) == (2, 2)


def told(error: TaptwiceError) -> tuple[StopReason, Outcome, str | None]:
    """What a handler of any error reads; its members are there by their names too."""
    found = report(error)
    names = ("attempts", "stop_reason", "outcome", "idempotency_key", "retry_after")
    assert tuple(getattr(error, name) for name in names) == found
    assert found.attempts == ()
    return found.stop_reason, found.outcome, found.idempotency_key


def test_the_same_wish_after_a_deploy_that_changed_its_body_is_not_told_to_take_a_new_name(
    connect: Any,
) -> None:
    with ScriptedServer([close, close, close, close, close, MADE]) as server, no_wait():
        client = connect(server.url)
        with pytest.raises(httpx2.RemoteProtocolError):
            client.post("/charges", json={"cents": 5}, intent="order-17")
        with pytest.raises(IntentChanged) as refused:
            client.post("/charges", json={"cents": 5, "currency": "eur"}, intent="order-17")
        key = keys(server)[0]
        assert told(refused.value) == (StopReason.INTENT_REFUSED, Outcome.UNKNOWN, key)
        said = rf"may have been done \(sent at 20[0-9T:+-]+, key {key}\); nothing was sent now"
        assert re.search(said, str(refused.value)), refused.value
        assert "find out at the server" in str(refused.value)
        client.post("/charges", json={"cents": 5}, intent="order-17")
        with pytest.raises(IntentChanged, match="was answered 201") as done:
            client.post("/charges", json={"cents": 6}, intent="order-17")
        assert told(done.value) == (StopReason.INTENT_REFUSED, Outcome.PROCESSED, key)


def test_an_intent_that_was_dropped_says_whether_it_had_been_sent(tmp_path: pathlib.Path) -> None:
    store = IntentStore(tmp_path / "intents.db")
    with ScriptedServer([503]) as server, no_wait(), Client(server.url, intents=store) as client:
        made = store.make("order-16")
        client.post("/charges", intent="order-17")
        outcomes = {"order-16": (Outcome.NOT_SENT, made.key), "order-17": (Outcome.UNKNOWN, keys(server)[0])}
        for name, known in outcomes.items():
            store.drop(name)
            with pytest.raises(IntentDropped) as refused:
                client.post("/charges", intent=name)
            assert told(refused.value) == (StopReason.INTENT_REFUSED, *known)
            assert (f"key {known[1]}" in str(refused.value)) == (name == "order-17")


def test_whatever_ends_a_call_before_it_is_sent_carries_a_report(
    tmp_path: pathlib.Path, connect: Any
) -> None:
    with ScriptedServer([MADE]) as server:
        with pytest.raises(Misuse, match="not both") as wrong:
            connect(server.url).post("/charges", intent="order-17", idempotency_key="k")
        assert told(wrong.value) == (StopReason.NOT_BEGUN, Outcome.NOT_SENT, None)
        store = IntentStore(lambda: sqlite3.connect(tmp_path / "other.db"))  # without its tables
        with Client(server.url, intents=store) as client, pytest.raises(TaptwiceError) as lost:
            client.post("/charges", intent="order-17")
        assert told(lost.value) == (StopReason.NOT_BEGUN, Outcome.UNKNOWN, None)
        assert server.requests == []


def test_with_a_namespace_the_key_is_made_from_the_name(connect: Any) -> None:
    with ScriptedServer([MADE]) as server:
        connect(server.url, namespace="shop-test").post("/charges", intent="order-17")
        assert keys(server) == [key_of("shop-test", "order-17")]


@pytest.mark.parametrize(
    "step", [429, 503, 401, problem(409, "in-progress")], ids=["429", "503", "401", "409"]
)
def test_what_is_no_answer_leaves_the_intent_open(connect: Any, step: Step) -> None:
    with ScriptedServer([step]) as server, no_wait():
        client = connect(server.url)
        client.post("/charges", intent="order-17")
        before = len(server.requests)
        client.post("/charges", intent="order-17")
        assert len(server.requests) > before
        assert len(set(keys(server))) == 1


def test_a_decision_against_us_is_an_answer(connect: Any) -> None:
    with ScriptedServer([answer(402, body=b"no")]) as server:
        client = connect(server.url)
        for _ in range(2):
            assert client.post("/charges", intent="order-17").content == b"no"
        assert len(server.requests) == 1


def test_bodies_that_an_intent_can_be_bound_to(connect: Any) -> None:
    with ScriptedServer([MADE]) as server:
        client = connect(server.url)
        for number, content in enumerate([b"body", "body", io.BytesIO(b"body"), lambda: b"body"]):
            client.post("/charges", content=content, intent=f"order-{number}")
        assert [request.body for request in server.requests] == [b"body"] * 4
        with pytest.raises(Misuse, match="generator"):
            client.post("/charges", content=(part for part in [b"body"]), intent="order-5")


def test_a_stream_is_remembered_without_its_body(tmp_path: pathlib.Path) -> None:
    store = IntentStore(tmp_path / "intents.db")
    with ScriptedServer([MADE]) as server, Client(server.url, intents=store) as client:
        for _ in range(2):
            with client.stream("POST", "/charges", intent="order-17") as response:
                assert response.read() == b'{"id": 1}'
        assert len(set(keys(server))) == 1
        assert len(server.requests) == 2


def test_older_than_the_servers_window(tmp_path: pathlib.Path) -> None:
    store = IntentStore(tmp_path / "intents.db", window="5s")  # a call may last ten
    with ScriptedServer([MADE]) as server, Client(server.url, intents=store) as client:
        with pytest.raises(IntentTooOld):
            client.post("/charges", intent="order-17")
        with pytest.raises(IntentTooOld, match="shorter deadline"):
            client.post("/charges", intent="order-17", deadline=None)
        assert client.post("/charges", intent="order-17", deadline=1).status_code == 201
    forever = IntentStore(tmp_path / "intents.db", window=None)
    with ScriptedServer([MADE]) as server, Client(server.url, intents=forever) as client:
        assert client.post("/charges", intent="order-18", deadline=None).status_code == 201


def test_a_store_of_the_other_kind_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Misuse, match="wants an IntentStore"):
        Client(intents=AsyncIntentStore(tmp_path / "intents.db"))
    with pytest.raises(Misuse, match="wants an AsyncIntentStore"):
        AsyncClient(intents=IntentStore(tmp_path / "intents.db"))


CHILD = """
import sys
from taptwice.client import Client
from taptwice.client.intents import IntentStore

url, path, cents = sys.argv[1:]
with Client(url, intents=IntentStore(path)) as client:
    print(client.post("/charges", json={"cents": int(cents)}, intent="order-17", deadline=60).status_code)
"""


@pytest.mark.crash
def test_t30_killed_in_flight_and_restarted(tmp_path: pathlib.Path) -> None:
    def child(url: str, cents: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, url, str(tmp_path / "intents.db"), str(cents)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with ScriptedServer([hang, MADE]) as server:
        first = child(server.url, 5)
        while not server.requests:
            assert first.poll() is None
            server.stopping.wait(0.01)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        for cents, code in ((5, 0), (5, 0), (6, 1)):
            run = child(server.url, cents)
            output, errors = run.communicate(timeout=60)
            assert run.returncode == code, errors
            assert ("201" in output) == (code == 0)
            assert ("IntentChanged" in errors) == (code == 1)
        assert (len(server.requests), len(set(keys(server)))) == (2, 1)
