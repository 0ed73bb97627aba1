"""Settings that cannot be meant are found where they are given, before anything is sent."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest

from taptwice.client import AsyncClient, CircuitBreaker, Client, RetryBudget, RetryPolicy, retry
from taptwice.client.aiohttp import RetryMiddleware
from taptwice.client.grpc import RetryInterceptor
from taptwice.client.httpx2 import AsyncRetryTransport, RetryTransport
from taptwice.client.intents import IntentStore
from taptwice.client.requests import RetryAdapter
from taptwice.client.testing import ScriptedServer
from taptwice.errors import Misuse

CLIENTS: tuple[Callable[..., Any], ...] = (
    Client,
    AsyncClient,
    RetryTransport,
    AsyncRetryTransport,
    RetryAdapter,
    RetryMiddleware,
    RetryInterceptor,
)


def named(value: object) -> str:
    """The same in every process: an address would be another in each."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize("make", CLIENTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listeners": print}, r"listeners=\[print\]"),
        ({"listeners": ["print"]}, "give functions"),
        ({"policy": {}}, r"RetryPolicy\(deadline=30\)"),
        ({"policy": 3}, r"policy=3"),
        ({"world": 5}, "world=5"),
        ({"breaker": CircuitBreaker()}, "breaker=lambda: shared"),
        ({"budget": RetryBudget()}, "budget=lambda: shared"),
    ],
    ids=named,
)
def test_what_all_are_told(make: Callable[..., Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"refused": 429}, r"refused=\{429\}"),
        ({"refused": {"503"}}, "as numbers"),
        ({"refused": "503"}, "must be a set"),
        ({"unknown": {200}}, "final"),
        ({"unknown": {500, 201}}, r"unknown=\{201\}"),
        ({"unknown": {True}}, "unknown"),
        ({"attempt_header": ""}, "attempt_header='' must be the name of a header field, or None"),
        ({"timeout_header": "a b"}, "timeout_header"),
        ({"key_header": None}, "key_header=None"),
        ({"problems": 5}, "problems=5"),
        ({"problems": ""}, "problems=''"),
        ({"in_progress": "error.code"}, "pairs"),
        ({"in_progress": ("error.code", "key_in_use")}, "pairs"),
        ({"max_attempts": 2.5}, "whole number"),
        ({"max_attempts": True}, "whole number"),
        ({"max_attempts": "3"}, "whole number"),
        ({"deadline": "10s"}, "write 10"),
        ({"deadline": True}, "deadline=True"),
        ({"per_try": "soon"}, "write a number"),
        ({"base": "400ms"}, "write 0.4"),
        ({"auto_key": "no"}, "True or False"),
    ],
    ids=named,
)
def test_the_policy(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        RetryPolicy(**settings)


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"deadline": 3}, r"policy=RetryPolicy\(deadline=3\)"),
        ({"max_attempts": 3, "deadline": 2}, r"RetryPolicy\(deadline=2, max_attempts=3\)"),
        ({"namespace": 5}, "namespace=5"),
        ({"namespace": ""}, "namespace=''"),
        ({"intents": "intents.db"}, r"IntentStore\('intents.db'\)"),
        ({"http": 5}, "http=5"),
        ({"http": httpx2.HTTPTransport()}, "http=HTTPTransport"),
    ],
    ids=named,
)
def test_the_clients(make: Callable[..., Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        make(**settings)


@pytest.mark.parametrize("lib", [httpx, httpx2], ids=lambda lib: lib.__name__)
def test_a_client_of_the_other_kind(lib: Any) -> None:
    with pytest.raises(Misuse, match=f"AsyncClient wants a {lib.__name__}.AsyncClient"):
        AsyncClient(http=lib.Client())
    with pytest.raises(Misuse, match=f"Client wants a {lib.__name__}.Client; for this one take AsyncClient"):
        Client(http=lib.AsyncClient())


def test_retry_has_one_of_each_not_what_makes_it() -> None:
    for settings in ({"breaker": CircuitBreaker}, {"budget": RetryBudget}, {"breaker": 5}):
        with pytest.raises(Misuse, match="give one that is made"):
            retry(on=OSError, **settings)


@pytest.mark.parametrize(
    "options",
    [{"idempotency_key": 5}, {"idempotency_key": ""}, {"intent": 5}, {"intent": ""}, {"deadline": "3s"}],
    ids=named,
)
def test_a_call_that_cannot_be_meant_sends_nothing(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    store = IntentStore(tmp_path / "intents.db")
    with ScriptedServer() as server, Client(server.url, namespace="shop-test", intents=store) as client:
        with pytest.raises(Misuse, match=next(iter(options))):
            client.post("/charges", **options)
        assert server.requests == []
