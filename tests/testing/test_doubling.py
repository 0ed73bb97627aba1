"""A test suite's client of which everything arrives twice."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections import Counter
from random import Random
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from taptwice.core.plan import run
from taptwice.core.policy import Policy
from taptwice.testing import assert_once, twice
from taptwice.testing.calls import Answer, Call
from taptwice.testing.doubling import Doubling
from tests.testing.shops import Shop, by_hand, fastapi_shop, flask_shop

CHARGE: dict[str, Any] = {"json": {"cents": 100}}


def charges(shop: Shop) -> int:
    with contextlib.closing(shop.connect()) as connection:
        found: int = connection.execute("SELECT count(*) FROM charges").fetchone()[0]
        return found


class Arrivals:
    """WSGI in front of an application: which requests came, and how many were there at most at once."""

    def __init__(self, app: Any) -> None:
        self._app = app.wsgi_app
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        app.wsgi_app = self

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self.lock:
            self.seen[f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"] += 1
        return self._app(environ, start_response)


def test_a_suite_that_is_good_notices_nothing(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    arrivals = Arrivals(shop.app)
    client = shop.app.test_client()
    with twice(client, seed=1, skip=["POST /login"]) as doubled:
        for number in range(1, 10):
            answer = client.post("/charges", **CHARGE)
            assert (answer.status_code, answer.get_json()) == (201, {"charge_id": number})
            assert "Idempotent-Replayed" not in answer.headers
        assert client.post("/charges", headers={"Idempotency-Key": "own"}, **CHARGE).status_code == 201
        assert client.put("/wallets/bea", json={"cents": 1}).status_code == 200
        assert client.get("/charges").get_json() == {"charges": 10}
        assert client.post("/login").status_code == 200
    assert arrivals.seen == {
        "POST /charges": 20,
        "PUT /wallets/bea": 2,
        "GET /charges": 1,
        "POST /login": 1,
    }
    assert doubled.sent_twice == 11
    assert 0 < doubled.at_once < 11, "some in turn, some at once"
    assert client.post("/charges", headers={"Idempotency-Key": "last"}, **CHARGE).status_code == 201
    assert arrivals.seen["POST /charges"] == 21, "behind the block once, as ever"


def test_assertions_are_not_doubled(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    with twice(client) as doubled:
        assert_once(client, "POST", "/charges", effects=lambda: charges(shop), rounds=1, **CHARGE)
        assert doubled.sent_twice == 0
        with twice(client) as inner:
            assert client.post("/charges", **CHARGE).status_code == 201
        assert client.post("/charges", **CHARGE).status_code == 201
    assert (doubled.sent_twice, inner.sent_twice, charges(shop)) == (1, 1, 4)


def test_the_seed_decides(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()

    def times(seed: int) -> list[int]:
        with twice(client, seed=seed) as doubled:
            found = []
            for _ in range(12):
                client.post("/charges", **CHARGE)
                found.append(doubled.at_once)
        return found

    assert times(3) == times(3)
    assert times(3) != times(4)


def test_a_route_that_takes_no_key_is_found(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    with twice(client), pytest.raises(AssertionError) as failed:
        client.post("/login")
    text = str(failed.value)
    assert text.startswith("POST /login, sent twice:\n  carried out twice: the second answer, 200 ")
    assert text.endswith("is left out by skip=['METHOD /path']")


def test_refusals_are_the_same_twice(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    own = {"Idempotency-Key": "own"}
    with twice(client):
        assert client.post("/nowhere").status_code == 404
        assert client.post("/charges", headers=own, **CHARGE).status_code == 201
        assert client.post("/charges", headers=own, json={"cents": 1}).status_code == 422
        again = client.post("/charges", headers=own, **CHARGE)
        assert again.headers["Idempotent-Replayed"] == "true", "the test's own replay"


def test_what_the_application_raises(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    shop.app.testing = True
    client = shop.app.test_client()
    with twice(client), pytest.raises(KeyError, match="cents"):
        client.post("/charges", json={})


def test_starlettes_client(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with TestClient(shop.app) as client, twice(client, seed=5) as doubled:
        for number in range(1, 9):
            assert client.post("/v1/charges", **CHARGE).json() == {"charge_id": number}
        assert client.delete("/v1/wallets/anna").status_code == 204
        assert client.request(method="PUT", url="/v1/wallets/anna?cents=3").status_code == 200
    assert (charges(shop), doubled.sent_twice) == (8, 10)
    assert doubled.at_once


async def test_a_client_that_awaits(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        with twice(client, seed=5) as doubled:
            for number in range(1, 9):
                assert (await client.post("/charges", **CHARGE)).json() == {"charge_id": number}
            with pytest.raises(AssertionError, match="PUT"):
                assert (await client.put("/notes/1?text=x")).status_code == 200
                assert (await client.get("/notes")).json() == [["first."], ["x"]], "PUT was to append once"
    assert (charges(shop), doubled.sent_twice) == (8, 9)
    assert doubled.at_once


def test_redirects_that_are_followed(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)

    def form() -> Any:
        shop.once.connection().execute("INSERT INTO charges (cents) VALUES (1)")
        return "", 303, {"Location": "/charges"}

    shop.app.add_url_rule("/form", view_func=shop.once.keyed()(form), methods=["POST"])
    client = shop.app.test_client()
    with twice(client) as doubled:
        answer = client.post("/form", follow_redirects=True)
    assert (answer.get_json(), doubled.sent_twice) == ({"charges": 1}, 1)


@pytest.mark.parametrize(
    ("method", "first", "again", "found"),
    [
        ("POST", 200, 500, "carried out twice: the second answer, 500 "),
        ("POST", 404, 500, "status: expected 404, found 500 "),
        ("PUT", 200, 500, "the first answer 200 b'1', the second 500 b'2'"),
        ("DELETE", 204, 404, None),
        ("PATCH", 404, 404, None),
    ],
)
def test_two_answers(tmp_path: pathlib.Path, method: str, first: int, again: int, found: str | None) -> None:
    shop = flask_shop(tmp_path)
    statuses = [first, again]
    numbered = lambda: (str(3 - len(statuses)), statuses.pop(0))  # noqa: E731
    shop.app.add_url_rule("/x", "x", numbered, methods=[method])
    client = shop.app.test_client()
    with twice(client, seed=2):  # whose first request is sent in turn
        if found is None:
            assert client.open("/x", method=method).status_code == first
        else:
            with pytest.raises(AssertionError) as failed:
                client.open("/x", method=method)
            assert found in str(failed.value)
    assert not statuses


def test_another_body_the_second_time(tmp_path: pathlib.Path) -> None:
    client = by_hand(tmp_path, "another body").app.test_client()
    with (
        twice(client),
        pytest.raises(AssertionError, match=r'sent twice:\n  body: expected b\'.*"charge_id":1'),
    ):
        client.post("/charges", **CHARGE)


async def test_a_service_that_does_not_wait(tmp_path: pathlib.Path) -> None:
    """Of two at once one is told 409, and asks again when the other has its answer."""
    shop = fastapi_shop(tmp_path, wait=0)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        with twice(client, seed=5, policy=Policy(wait=0)) as doubled:
            for number in range(1, 9):
                assert (await client.post("/charges", **CHARGE)).json() == {"charge_id": number}
    assert doubled.at_once


def test_whichever_of_the_two_came_first() -> None:
    """The plan alone: each order of a 409, a replay and the answer that was carried out."""
    problem = Answer(409, (("Content-Type", "application/problem+json"),), b'{"type": "x/in-progress"}', None)
    done = Answer(201, (), b"1", "done")
    replay = Answer(201, (("Idempotent-Replayed", "true"),), b"1", "replay")
    for answers in ([done, problem], [problem, done], [done, replay], [replay, done]):
        doubling = Doubling(Random(5), Policy(), [])
        doubling.random.random = lambda: 0.0  # type: ignore[method-assign]  # at once
        sent: list[Any] = []

        def execute(command: Any, answers: list[Answer] = answers, sent: list[Any] = sent) -> Any:
            sent.append(command)
            return tuple(answers) if len(sent) == 1 else (replay,)

        outcome = run(doubling.plan(Call("POST", "/charges")), execute)
        assert isinstance(outcome, Answer)
        assert outcome.response == "done"
        assert len(sent) == 1 + (problem in answers)
