"""On trio, in a process where nobody has imported anyio: that alone told an earlier version where it is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
import trio
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from taptwice.client.http import AsyncClient
from taptwice.client.intents import AsyncIntentStore
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.reports import report
from taptwice.client.testing import Peer, ScriptedServer
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.errors import Misuse


def alone(script: str, *arguments: str) -> str:
    """What a script prints that has a process to itself."""
    script = textwrap.dedent(script) + "\nimport sys; assert 'anyio' not in sys.modules\n"
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_retry_waits() -> None:
    script = """
        import trio
        from taptwice.client import RetryPolicy, retry

        calls = []

        @retry(on=ConnectionError, policy=RetryPolicy(base=0.001))
        async def fetch():
            calls.append(1)
            if len(calls) < 3:
                raise ConnectionError

        trio.run(fetch)
        print(len(calls))
        """
    assert alone(script) == "3"


def test_a_store_waits_in_a_thread(tmp_path: Path) -> None:
    script = """
        import sqlite3, sys, threading, trio
        from taptwice.client.intents import AsyncIntentStore, IntentStore, Sent, Wish
        from taptwice.core.model import Answer

        threads = []

        def connect():
            threads.append(threading.current_thread())
            return sqlite3.connect(sys.argv[1], check_same_thread=False)

        async def main():
            store = AsyncIntentStore(connect)
            threads.clear()

            async def send(key):
                return Sent(key, Answer(201, (), b""))

            await store.fulfil(Wish("order-17", b"print", "k-1"), send)
            return await store.get("order-17")

        IntentStore(sys.argv[1])  # makes the tables
        print(trio.run(main).key, len(threads), threading.main_thread() in threads)
        """
    assert alone(script, str(tmp_path / "intents.db")) == "k-1 3 False"


def test_connections_that_await_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    origin: Any = aiosqlite_driver.connecting(lambda: aiosqlite.connect(tmp_path / "intents.db"))
    store = AsyncIntentStore(origin)

    async def main(url: str) -> None:
        async with AsyncClient(url, namespace="n", intents=store) as client:
            await client.post("/", intent="order-17")

    with ScriptedServer() as server, pytest.raises(Misuse, match="a thread waits for them") as caught:
        trio.run(main, server.url)
    assert server.requests == []
    found = report(caught.value)
    assert (found.attempts, found.stop_reason, found.outcome) == ((), StopReason.NOT_BEGUN, Outcome.UNKNOWN)
    session = AsyncSession(create_async_engine("sqlite+aiosqlite://"))
    for make in (partial(store.make, "order-17"), partial(store.make, "order-17", connection=session)):
        with pytest.raises(Misuse, match="this is trio"):
            trio.run(make)


def test_a_task_that_is_cancelled_leaves_the_intent_open(tmp_path: Path) -> None:
    store = AsyncIntentStore(tmp_path / "intents.db")
    asked = threading.Semaphore(0)

    def hanging(peer: Peer) -> None:
        asked.release()
        peer.wait_until_gone()

    async def post(url: str) -> None:
        async with AsyncClient(url, namespace="n", intents=store) as client:
            await client.post("/", intent="order-17")

    async def cancelled(url: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, url)
            await trio.to_thread.run_sync(asked.acquire)
            nursery.cancel_scope.cancel()

    with ScriptedServer([hanging, 201]) as server:
        trio.run(cancelled, server.url)
        [found] = trio.run(store.list)
        assert (found.name, found.done_at) == ("order-17", None)
        assert found.sent_at is not None
        trio.run(post, server.url)
        assert len({request.header("Idempotency-Key") for request in server.requests}) == 1
        assert trio.run(store.list) == ()
