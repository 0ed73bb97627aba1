"""A test suite's client of which everything arrives twice."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections import Counter
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from taptwice.testing import twice
from tests.testing.shops import Shop, fastapi_shop, flask_shop

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
