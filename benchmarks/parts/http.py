"""Over HTTP: FastAPI under uvicorn in one process, the clients in another, PostgreSQL in its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.parts.load import Job
from benchmarks.parts.machine import settle
from benchmarks.parts.measure import Result, Rounds, judged
from benchmarks.parts.statements import REQUEST_BYTES

BODY = REQUEST_BYTES.decode()
STACKS: Mapping[str, str] = {
    "asyncpg": "asyncpg pool",
    "psycopg": "psycopg's async pool",
    "sqlalchemy": "SQLAlchemy AsyncSession on asyncpg",
}
CLIENTS = (16, 1, 64)
NEW_KEYS = ("bare", "hand", "hand-savepoint", "ours", "ours-savepoint")
KEYS_A_CLIENT = 8


class BenchError(Exception):
    """The service did not do what is measured."""


class Load:
    """The process of the clients."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.parts.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the clients failed at {job}")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, and how to ask it."""

    load: Load
    port: int
    url: str

    def new_keys(self, path: str, clients: int, seconds: float, expect_charges: bool = True) -> float:
        """The rate of requests with new keys, of which each made its charge."""
        before = _charges(self.url)
        outcome = self.load(Job(self.port, "POST", path, BODY, secrets.token_hex(8), clients, seconds))
        made = _charges(self.url) - before
        if outcome["statuses"] != {"201": outcome["done"]} or outcome["replayed"] or made != outcome["done"]:
            raise BenchError(f"POST {path}: {outcome}, {made} charges")
        return float(outcome["rate"])

    def prime(self, path: str, clients: int) -> str:
        """Do the work of the keys that will be replayed; the name of their run."""
        run = secrets.token_hex(8)
        job = Job(self.port, "POST", path, BODY, run, clients, requests=KEYS_A_CLIENT)
        outcome = self.load(job)
        if outcome["statuses"] != {"201": clients * KEYS_A_CLIENT}:
            raise BenchError(f"POST {path}: {outcome}")
        return run

    def replays(self, path: str, run: str, clients: int, seconds: float) -> float:
        before = _charges(self.url)
        outcome = self.load(Job(self.port, "POST", path, BODY, run, clients, seconds, keys=KEYS_A_CLIENT))
        made = _charges(self.url) - before
        if outcome["statuses"] != {"201": outcome["done"]} or outcome["replayed"] != outcome["done"] or made:
            raise BenchError(f"replays of POST {path}: {outcome}, {made} charges")
        return float(outcome["rate"])

    def reads(self, charge: int, clients: int, seconds: float) -> float:
        outcome = self.load(Job(self.port, "GET", f"/charges/{charge}", "", "read", clients, seconds))
        if outcome["statuses"] != {"200": outcome["done"]}:
            raise BenchError(f"GET /charges/{charge}: {outcome}")
        return float(outcome["rate"])


def _charges(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM charges").fetchone()
    assert row is not None
    return int(row[0])


def _a_charge(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "INSERT INTO charges (account, cents) VALUES ('acct_42', 1) RETURNING id"
        ).fetchone()
    assert row is not None
    return int(row[0])


@contextlib.contextmanager
def service(stack: str, url: str, load: Load) -> Iterator[Service]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.parts.app", stack, url, str(port)])
    try:
        _until_up(process, port)
        yield Service(load, port, url)
    finally:
        process.terminate()
        process.wait(30)


def _until_up(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise BenchError("the service did not start")


def section(url: str, quick: bool) -> list[Result]:
    results: list[Result] = []
    load = Load()
    try:
        for stack, words in STACKS.items():
            results += _stack(url, load, stack, words, quick)
        if importlib.util.find_spec("idemkit"):
            results += _beside_idemkit(url, load, quick)
    finally:
        load.close()
    return results


def _plan(clients: int, quick: bool) -> tuple[int, float]:
    """Rounds, and seconds of each."""
    if quick:
        return 2, 0.4
    return (7, 1.0) if clients == 16 else (3, 0.8)


def _stack(url: str, load: Load, stack: str, words: str, quick: bool) -> list[Result]:
    results = []
    settle(url)
    with service(stack, url, load) as running:
        for path in NEW_KEYS:
            running.new_keys(f"/{path}", 16, 0.5)
        charge = _a_charge(url)
        for clients in CLIENTS[:1] if quick else CLIENTS:
            rounds, seconds = _plan(clients, quick)
            rates: dict[str, list[float]] = {name: [] for name in (*NEW_KEYS, "read", "replay")}
            primed = running.prime("/ours", clients)
            for turn in range(rounds):
                names = list(rates)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    if name == "read":
                        rates[name].append(running.reads(charge, clients, seconds))
                    elif name == "replay":
                        rates[name].append(running.replays("/ours", primed, clients, seconds))
                    else:
                        rates[name].append(running.new_keys(f"/{name}", clients, seconds))
            results += _reported(Rounds(rates), f"HTTP · {words} · {clients} clients", clients)
    return results


def _reported(found: Rounds, group: str, clients: int) -> list[Result]:
    beside = 0.95 if clients == 16 else None
    read = 0.85 if clients == 16 else None
    return [
        Result(group, "bare endpoint", "", f"{found.median('bare'):,.0f}/s"),
        judged(group, "ours ÷ by hand", found, "ours", "hand", beside),
        judged(
            group,
            "ours + savepoint ÷ by hand + savepoint",
            found,
            "ours-savepoint",
            "hand-savepoint",
            beside,
        ),
        judged(group, "by hand ÷ bare", found, "hand", "bare", None),
        judged(group, "ours ÷ bare", found, "ours", "bare", None),
        judged(group, "ours + savepoint ÷ bare", found, "ours-savepoint", "bare", None),
        judged(group, "replays ÷ bare read of one row", found, "replay", "read", read),
    ]


def _beside_idemkit(url: str, load: Load, quick: bool) -> list[Result]:
    """New keys on asyncpg: the route of ours beside the bare route below idemkit's middleware."""
    from idemkit.backends.postgres import init_pg

    asyncio.run(init_pg(url))
    settle(url)
    results = []
    with service("asyncpg", url, load) as ours, service("idemkit", url, load) as theirs:
        theirs.new_keys("/bare", 16, 0.5)
        ours.new_keys("/ours-savepoint", 16, 0.5)
        for clients in CLIENTS[:1] if quick else CLIENTS:
            rounds, seconds = _plan(clients, quick)
            rates: dict[str, list[float]] = {"bare": [], "ours": [], "ours-savepoint": [], "idemkit": []}
            for turn in range(rounds):
                names = list(rates)
                for name in names[turn % 4 :] + names[: turn % 4]:
                    service_, path = (theirs, "/bare") if name == "idemkit" else (ours, f"/{name}")
                    rates[name].append(service_.new_keys(path, clients, seconds))
            found, group = Rounds(rates), f"HTTP · idemkit on PostgreSQL · {clients} clients"
            goal = 2.0 if clients == 16 else None
            results += [
                judged(group, "idemkit ÷ bare", found, "idemkit", "bare", None),
                judged(group, "ours ÷ idemkit", found, "ours", "idemkit", goal),
                judged(group, "ours + savepoint ÷ idemkit", found, "ours-savepoint", "idemkit", goal),
            ]
    return results
