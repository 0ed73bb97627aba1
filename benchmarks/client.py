"""The retrying client on calls that succeed at once, measured: `./dev bench client [--quick] [--save]`.

All variants run in turn, round after round, and the best of each counts: what a call costs is what it costs
when the machine does nothing besides. `--quick` takes seconds and is good for seeing that it runs; `--save`
writes docs/benchmarks-client.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import logging
import os
import pathlib
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import aiohttp
import backoff
import httpx
import httpx2
import httpx_retries
import requests
import stamina
import tenacity
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from benchmarks.parts.measure import Result
from taptwice.client import AsyncClient, CircuitBreaker, Client, retry
from taptwice.client.aiohttp import RetryMiddleware
from taptwice.client.httpx2 import RetryTransport
from taptwice.client.requests import RetryAdapter

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "benchmarks-client.md"
PACKAGES = (
    *("httpx2", "httpx", "requests", "urllib3", "aiohttp"),
    *("tenacity", "stamina", "backoff", "httpx-retries"),
)
INTRODUCTION = """\
Each figure is the best of many rounds, and all variants of a group took turns in them. "Over nothing" is what
the decorator adds to a function that returns at once. Ours has a deadline, a retry budget and a circuit
breaker in all of them. Requests go over the loopback, on one connection, to a server in another process that
does nothing but answer; to a real server they take longer, and the share is smaller. The time is the best
single call's; the CPU that of the best round, all of this process's, and less moved by what else the machine
does. `Client` keeps what httpx2 makes of a URL, and so gains on it where a program calls the same ones again,
as most POSTs do; the row with another URL each time is without that."""


# --- around nothing -----------------------------------------------------------------------------------------


AT_A_TIME = 500
"""Calls between two looks at the clock: few enough that some of these spans are undisturbed."""


def nothing() -> int:
    return 1


async def nothing_awaited() -> int:
    return 1


def around_nothing(rounds: int, number: int) -> list[Result]:
    """Microseconds that each library adds to a blocking function."""
    ours = retry(on=ConnectionError, breaker=CircuitBreaker())(nothing)
    variants: dict[str, Callable[[], Any]] = {
        "bare": nothing,
        "taptwice `@retry`": ours,
        "backoff": backoff.on_exception(backoff.expo, ConnectionError, max_tries=5)(nothing),
        "stamina": stamina.retry(on=ConnectionError)(nothing),
        "tenacity": tenacity.retry(stop=tenacity.stop_after_attempt(5))(nothing),
    }
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, call in variants.items():
            for _ in range(number // AT_A_TIME):
                begun = time.perf_counter()
                for _ in range(AT_A_TIME):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begun) / AT_A_TIME)
    return _over("a blocking function", best)


def around_nothing_awaited(rounds: int, number: int) -> list[Result]:
    """The same for an awaiting function."""
    ours = retry(on=ConnectionError, breaker=CircuitBreaker())(nothing_awaited)
    variants: dict[str, Callable[[], Awaitable[Any]]] = {
        "bare": nothing_awaited,
        "taptwice `@retry`": ours,
        "backoff": backoff.on_exception(backoff.expo, ConnectionError, max_tries=5)(nothing_awaited),
        "stamina": stamina.retry(on=ConnectionError)(nothing_awaited),
        "tenacity": tenacity.retry(stop=tenacity.stop_after_attempt(5))(nothing_awaited),
    }
    best = dict.fromkeys(variants, float("inf"))

    async def measure() -> None:
        for _ in range(rounds):
            for name, call in variants.items():
                for _ in range(number // AT_A_TIME):
                    begun = time.perf_counter()
                    for _ in range(AT_A_TIME):
                        await call()
                    best[name] = min(best[name], (time.perf_counter() - begun) / AT_A_TIME)

    asyncio.run(measure())
    return _over("an awaiting function", best)


def _over(group: str, best: Mapping[str, float]) -> list[Result]:
    results = []
    for name, seconds in best.items():
        if name != "bare":
            over = (seconds - best["bare"]) * 1e6
            goal = "≤ 0.60 µs" if "taptwice" in name else ""
            met = over <= 0.6 if goal else None
            results.append(Result(f"Over nothing: {group}", name, goal, f"{over:.2f} µs", met))
    return results


# --- around a request ---------------------------------------------------------------------------------------

BODY = {"amount_cents": 5000, "currency": "eur"}
KEY = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324"}
ANSWER = b'HTTP/1.1 201 Created\r\nContent-Length: 11\r\nContent-Type: application/json\r\n\r\n{"id":"ch"}'


def serve() -> None:
    """The server's process: prints its port, and answers whatever ends like a JSON document."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(65536):
            if data.endswith(b"}"):
                connection.sendall(ANSWER)


@contextlib.contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-c", "from benchmarks.client import serve; serve()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def requests_blocking(url: str, rounds: int, number: int) -> list[Result]:
    """Microseconds of a POST through each blocking library, bare and with retries."""
    with contextlib.ExitStack() as stack:
        bare2 = stack.enter_context(httpx2.Client(base_url=url))
        ours = stack.enter_context(Client(url, breaker=CircuitBreaker))
        transport = RetryTransport(breaker=CircuitBreaker)
        beneath = stack.enter_context(httpx2.Client(base_url=url, transport=transport))
        bare = stack.enter_context(httpx.Client(base_url=url))
        theirs = httpx_retries.RetryTransport()
        with_retries = stack.enter_context(httpx.Client(base_url=url, transport=theirs))
        sessions = [stack.enter_context(requests.Session()) for _ in range(3)]
        sessions[1].mount(url, RetryAdapter(breaker=CircuitBreaker))
        sessions[2].mount(url, HTTPAdapter(max_retries=Retry(3)))
        for session in sessions:
            session.trust_env = False
        plain, adapter, urllib3 = sessions
        place = f"{url}/p"
        numbers = itertools.count()

        def other() -> str:
            return f"/p/{next(numbers)}"

        variants: dict[str, Callable[[], Any]] = {
            "httpx2": lambda: bare2.post("/p", json=BODY, headers=KEY),
            "taptwice Client, key given": lambda: ours.post("/p", json=BODY, headers=KEY),
            "taptwice Client, key made": lambda: ours.post("/p", json=BODY),
            "httpx2, another URL each time": lambda: bare2.post(other(), json=BODY, headers=KEY),
            "taptwice Client, another URL each time": lambda: ours.post(other(), json=BODY, headers=KEY),
            "taptwice transport": lambda: beneath.post("/p", json=BODY, headers=KEY),
            "httpx": lambda: bare.post("/p", json=BODY, headers=KEY),
            "httpx-retries": lambda: with_retries.post("/p", json=BODY, headers=KEY),
            "requests": lambda: plain.post(place, json=BODY, headers=KEY),
            "taptwice adapter": lambda: adapter.post(place, json=BODY, headers=KEY),
            "urllib3 Retry": lambda: urllib3.post(place, json=BODY, headers=KEY),
        }
        best = dict.fromkeys(variants, float("inf"))
        cpu = dict.fromkeys(variants, float("inf"))
        for _ in range(rounds):
            for name, call in variants.items():
                spent = time.process_time()
                for _ in range(number):
                    begun = time.perf_counter()
                    call()
                    best[name] = min(best[name], time.perf_counter() - begun)
                cpu[name] = min(cpu[name], (time.process_time() - spent) / number)
    base = {
        "taptwice Client, key given": ("httpx2", 1.03),
        "taptwice Client, key made": ("httpx2", 1.06),
        "taptwice Client, another URL each time": ("httpx2, another URL each time", None),
        "taptwice transport": ("httpx2", None),
        "httpx-retries": ("httpx", None),
        "taptwice adapter": ("requests", None),
        "urllib3 Retry": ("requests", None),
    }
    return _beside("a POST, blocking", best, cpu, base)


def requests_awaiting(url: str, rounds: int, number: int) -> list[Result]:
    """The same for awaiting libraries."""
    best: dict[str, float] = {}
    cpu: dict[str, float] = {}

    async def measure() -> None:
        async with contextlib.AsyncExitStack() as stack:
            bare = await stack.enter_async_context(httpx2.AsyncClient(base_url=url))
            ours = await stack.enter_async_context(AsyncClient(url, breaker=CircuitBreaker))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            middleware = RetryMiddleware(breaker=CircuitBreaker)
            retrying = await stack.enter_async_context(aiohttp.ClientSession(middlewares=[middleware]))

            async def through(session: aiohttp.ClientSession) -> None:
                async with session.post(f"{url}/p", json=BODY, headers=KEY) as response:
                    await response.read()

            variants: dict[str, Callable[[], Awaitable[Any]]] = {
                "httpx2": lambda: bare.post("/p", json=BODY, headers=KEY),
                "taptwice AsyncClient, key given": lambda: ours.post("/p", json=BODY, headers=KEY),
                "aiohttp": lambda: through(session),
                "taptwice middleware": lambda: through(retrying),
            }
            for _ in range(rounds):
                for name, call in variants.items():
                    spent = time.process_time()
                    for _ in range(number):
                        begun = time.perf_counter()
                        await call()
                        best[name] = min(best.get(name, 1.0), time.perf_counter() - begun)
                    cpu[name] = min(cpu.get(name, 1.0), (time.process_time() - spent) / number)

    asyncio.run(measure())
    base = {
        "taptwice AsyncClient, key given": ("httpx2", 1.03),
        "taptwice middleware": ("aiohttp", None),
    }
    return _beside("a POST, awaiting", best, cpu, base)


def _beside(
    group: str,
    best: Mapping[str, float],
    cpu: Mapping[str, float],
    base: Mapping[str, tuple[str, float | None]],
) -> list[Result]:
    results = []
    for name, seconds in best.items():
        shown, goal, met = f"{seconds * 1e6:.0f} µs", "", None
        if name in base:
            other, most = base[name]
            ratio = seconds / best[other]
            shown += f", {ratio:.3f} of {other}; {cpu[name] / cpu[other]:.3f} of its CPU"
            goal, met = (f"≤ {most:.2f}", ratio <= most) if most else ("", None)
        results.append(Result(f"Around {group}", name, goal, shown, met))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench client", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if options.save and options.quick:
        parser.error("--save wants the whole run, without --quick")
    logging.disable(logging.CRITICAL)
    rounds, number = (3, 100) if options.quick else (25, 200)
    load = os.getloadavg()[0]
    results = [
        *around_nothing(3 if options.quick else 15, 20_000),
        *around_nothing_awaited(3 if options.quick else 15, 20_000),
    ]
    with server() as url:
        results += requests_blocking(url, rounds, number)
        results += requests_awaiting(url, rounds, number)
    facts = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores; load average at the start {load:.1f}"
        + ("; **the machine was busy with other work: these figures are rough**" if load > 1 else ""),
        ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    ]
    print(*facts, *_table(results), sep="\n")
    if options.save:
        today = f"{datetime.datetime.now(datetime.UTC):%d %B %Y}"
        lines = [
            "# Benchmarks of the client",
            "",
            f"Written by `./dev bench client --save` on {today}.",
            "",
            INTRODUCTION,
            "",
            *(f"- {fact}" for fact in facts),
            *_table(results),
        ]
        PAGE.write_text("\n".join(lines) + "\n")
        print(f"wrote docs/{PAGE.name}")
    return 0


def _table(results: list[Result]) -> list[str]:
    lines: list[str] = []
    group = ""
    for result in results:
        if result.group != group:
            group = result.group
            lines += [
                *([""] if lines else []),
                f"## {group}",
                "",
                "| | goal | measured | |",
                "|---|---|---|---|",
            ]
        verdict = "" if result.met is None else "met" if result.met else "missed"
        lines.append(f"| {result.what} | {result.goal} | {result.measured} | {verdict} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
