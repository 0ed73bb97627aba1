"""The cases of the retrying client on other libraries: `./dev bench client_peers [--save]`.

Each is set up as its documentation shows, with what it has: four attempts, waits from 0.1 s to 1 s, 429, 5xx
and broken connections retried, a time limit of five seconds where it knows one. `--save` writes
docs/client-peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import httpx
import httpx2
import httpx_retries
import requests
import stamina
import tenacity
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from taptwice.client import Client, RetryPolicy
from taptwice.client.testing import ScriptedServer, answer, close, drip, problem, send

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "client-peers.md"
FAILING = (429, 500, 502, 503, 504)
DEADLINE = 5.0
INTRODUCTION = """\
Written by `./dev bench client_peers --save` on {today}: the same calls to the same misbehaving server,
through each library as its documentation sets it up, to retry 429, 5xx and broken connections with four
attempts, waits from 0.1 s to 1 s, and a time limit of five seconds where it knows one. tenacity and stamina
go around a function that calls httpx2. A **no** is not always a fault of the library's: some were not made
for the question. But it is what a service gets that uses it so."""


class TooLong(BaseException):
    """Somebody was about to sleep for longer than any caller waits."""


@dataclass
class Got:
    """What a call brought."""

    status: int | None
    body: bytes
    seconds: float


# --- those who take part ------------------------------------------------------------------------------------


def taptwice(deadline: float, wait: float | None) -> Any:
    base, cap = (0.1, 1.0) if wait is None else (wait, wait)
    policy = RetryPolicy(max_attempts=4, base=base, cap=cap, deadline=deadline, auto_key=False)
    return Client(policy=policy)


class Function:
    """httpx2 inside a function that a decorator retries."""

    def __init__(self, decorate: Any) -> None:
        self._http = httpx2.Client(timeout=DEADLINE)
        self.request = decorate(self._request)

    def _request(self, method: str, url: str, **more: Any) -> httpx2.Response:
        response = self._http.request(method, url, **more)
        if response.status_code in FAILING:
            response.raise_for_status()
        return response

    def close(self) -> None:
        self._http.close()


def with_tenacity(deadline: float, wait: float | None) -> Any:
    waits: Any = tenacity.wait_random_exponential(0.1, max=1) if wait is None else tenacity.wait_fixed(wait)
    return Function(
        tenacity.retry(
            retry=tenacity.retry_if_exception_type(httpx2.HTTPError),
            stop=tenacity.stop_after_attempt(4) | tenacity.stop_after_delay(deadline),
            wait=waits,
            reraise=True,
        )
    )


def with_stamina(deadline: float, wait: float | None) -> Any:
    settings = {"wait_initial": 0.1, "wait_max": 1.0, "wait_jitter": 0.1}
    if wait is not None:
        settings = {"wait_initial": wait, "wait_max": wait, "wait_jitter": 0.0}
    return Function(stamina.retry(on=httpx2.HTTPError, attempts=4, timeout=deadline, **settings))


class WithUrllib3:
    def __init__(self, deadline: float, wait: float | None) -> None:
        self._session = requests.Session()
        self._session.trust_env = False
        retries = Retry(3, status_forcelist=FAILING, backoff_factor=wait or 0.1, backoff_max=wait or 1.0)
        self._session.mount("http://", HTTPAdapter(max_retries=retries))
        self._timeout = deadline

    def request(self, method: str, url: str, content: Any = None, headers: Any = None) -> Any:
        return self._session.request(method, url, data=content, headers=headers, timeout=self._timeout)

    def close(self) -> None:
        self._session.close()


def with_httpx_retries(deadline: float, wait: float | None) -> Any:
    settings: dict[str, Any] = {} if wait is None else {"backoff_jitter": 0, "max_backoff_wait": wait}
    retries = httpx_retries.Retry(total=3, backoff_factor=wait or 0.1, status_forcelist=FAILING, **settings)
    return httpx.Client(transport=httpx_retries.RetryTransport(retry=retries), timeout=deadline)


PEERS: dict[str, Callable[[float, float | None], Any]] = {
    "taptwice": taptwice,
    "tenacity": with_tenacity,
    "stamina": with_stamina,
    "urllib3 Retry": WithUrllib3,
    "httpx-retries": with_httpx_retries,
}


# --- the cases ----------------------------------------------------------------------------------------------


class Scene:
    """A peer and a server; what is asked of them."""

    def __init__(self, make: Callable[[float, float | None], Any]) -> None:
        self._make = make
        self.requests: list[Any] = []

    def call(
        self,
        script: list[Any],
        method: str = "GET",
        deadline: float = DEADLINE,
        wait: float | None = None,
        **more: Any,
    ) -> Got:
        with ScriptedServer(script) as server, contextlib.closing(self._make(deadline, wait)) as client:
            began = time.monotonic()
            try:
                response = client.request(method, server.url + "/x", **more)
                got = response.status_code, response.content
            except Exception:
                got = None, b""
            except TooLong:
                return Got(None, b"", float("inf"))
            finally:
                self.requests = server.requests
            return Got(*got, time.monotonic() - began)


def t03(scene: Scene) -> bool:
    got = scene.call([answer(503, {"Retry-After": "2"}), 200])
    return got.status == 200 and got.seconds >= 2


def t06(scene: Scene) -> bool:
    return all(
        scene.call([answer(503, {"Retry-After": value}), 200]).status == 200
        for value in ("soon", "-5", "1.5")
    )


def t07(scene: Scene) -> bool:
    return scene.call([answer(429, {"Retry-After": "86400"}), 200]).seconds < 2 and len(scene.requests) == 1


def t11(scene: Scene) -> bool:
    return scene.call([503], deadline=1.0, wait=0.7).seconds < 1.0


def t14(scene: Scene) -> bool:
    return scene.call([drip(b"x" * 40, 0.1)], deadline=1.0).seconds < 1.6


def t19(scene: Scene) -> bool:
    _ = scene.call([close, 201], "POST", content=b"pay")
    return len(scene.requests) == 1


def t20(scene: Scene) -> bool:
    got = scene.call([close, 503, 201], "POST", content=b"pay", headers={"Idempotency-Key": "k"})
    return got.status == 201 and {request.body for request in scene.requests} == {b"pay"}


def t23(scene: Scene) -> bool:
    got = scene.call(
        [send(b"HTTP/1.1 200 OK\r\nContent-Le"), answer(200, body=b"whole")], "PUT", content=b"x"
    )
    return (got.status, got.body) == (200, b"whole")


def t24(scene: Scene) -> bool:
    cut = send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nwho")
    got = scene.call([cut, answer(200, body=b"whole")], "PUT", content=b"x")
    return (got.status, got.body) == (200, b"whole")


def t26(scene: Scene) -> bool:
    waiting = problem(409, "in-progress", {"Retry-After": "1"})
    got = scene.call([waiting, 201], "POST", content=b"pay", headers={"Idempotency-Key": "k"})
    return got.status == 201


def t27(scene: Scene) -> bool:
    got = scene.call([answer(409, body=b"taken"), 201], "POST", headers={"Idempotency-Key": "k"})
    return (got.status, len(scene.requests)) == (409, 1)


def t31(scene: Scene) -> bool:
    _ = scene.call([503, 200], "PUT", content=(part for part in [b"bo", b"dy"]))
    return all(request.body == b"body" for request in scene.requests)


def t42(scene: Scene) -> bool:
    _ = scene.call([answer(503, {"x-should-retry": "false"}), 200])
    return len(scene.requests) == 1


CASES: dict[str, tuple[str, Callable[[Scene], bool]]] = {
    "T03": ("never back earlier than Retry-After", t03),
    "T06": ("a Retry-After that cannot be used is no error", t06),
    "T07": ("Retry-After of a day: gives up at once, sleeps for nothing", t07),
    "T11": ("a time limit of 1 s, waits of 0.7 s: no third attempt, no sleep into the limit", t11),
    "T14": ("a time limit of 1 s holds while the body drips", t14),
    "T19": ("a POST without a key is not sent twice after a broken connection", t19),
    "T20": ("a POST with a key is, after that and after a 503", t20),
    "T23": ("an answer whose head was cut is asked for again", t23),
    "T24": ("an answer whose body was cut is asked for again", t24),
    "T26": ("409 in progress is asked again", t26),
    "T27": ("any other 409 is not", t27),
    "T31": ("a generator is never followed by an empty second body", t31),
    "T42": ("`x-should-retry: false` is heeded", t42),
}


@contextlib.contextmanager
def no_endless_sleep() -> Iterator[None]:
    """Lets nobody sleep for more than ten seconds."""
    real = time.sleep

    def sleep(seconds: Any) -> None:
        if seconds > 2 * DEADLINE:
            raise TooLong
        real(seconds)

    time.sleep = sleep
    try:
        yield
    finally:
        time.sleep = real


def main() -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="./dev bench client_peers", description=description)
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    lines = [f"| | | {' | '.join(PEERS)} |", "|---|---|" + "---|" * len(PEERS)]
    print(*lines, sep="\n", flush=True)
    with no_endless_sleep():
        for name, (title, ask) in CASES.items():
            found = ["yes" if ask(Scene(make)) else "**no**" for make in PEERS.values()]
            lines.append(f"| {name} | {title} | {' | '.join(found)} |")
            print(lines[-1], flush=True)
    if options.save:
        today = f"{datetime.datetime.now(datetime.UTC):%d %B %Y}"
        versions = ("httpx2", "requests", "urllib3", "httpx", "tenacity", "stamina", "httpx-retries")
        tail = ", ".join(f"{name} {version(name)}" for name in versions)
        text = [
            "# The client's cases on other libraries",
            "",
            INTRODUCTION.format(today=today),
            "",
            *lines,
            "",
            tail,
        ]
        PAGE.write_text("\n".join(text) + "\n")
        print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
