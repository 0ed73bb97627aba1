"""`assert_idempotent` and `promised`: what PUT, DELETE, GET and HEAD promise, kept and broken."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from taptwice.errors import Misuse
from taptwice.testing import Effects, assert_idempotent, promised
from tests.testing.shops import Shop, fastapi_shop, flask_shop

EXAMPLES: dict[str, Any] = {
    "GET /v1/wallets/{owner}": {"url": "/v1/wallets/anna"},
    "PUT /v1/wallets/{owner}": {"url": "/v1/wallets/bea", "params": {"cents": 5}},
    "DELETE /v1/wallets/{owner}": {"url": "/v1/wallets/anna"},
    "PUT /v1/notes/{number}": {"url": "/v1/notes/2", "params": {"text": "second"}},
}


def effects(shop: Shop) -> Effects:
    return Effects(shop.connect, "wallets", "notes")


def broken(shop: Shop, client: Any) -> dict[str, str]:
    """What is found on each route."""
    found = {}
    for call in promised(shop.app, EXAMPLES):
        try:
            assert_idempotent(client, call.method, call.url, effects=effects(shop), **call.options)
        except AssertionError as error:
            found[str(call)] = str(error)
    return found


def test_each_route_of_fastapi(tmp_path: pathlib.Path) -> None:
    """A PUT that appends is found, and a GET that writes; a PUT that sets and a DELETE are good."""
    shop = fastapi_shop(tmp_path)
    with TestClient(shop.app) as client:
        found = broken(shop, client)
    assert found == {
        "PUT /v1/notes/2": "PUT /v1/notes/2 does not keep what PUT promises:\n"
        "  sent again: one more effect: notes: 1 row added",
        "GET /v1/notes": "GET /v1/notes does not keep what GET promises:\n"
        "  GET is safe, and had an effect: notes: 1 row changed\n"
        "  sent again: one more effect: notes: 1 row changed",
    }


async def test_a_client_that_awaits(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        answer = await assert_idempotent(client, "DELETE", "/wallets/anna", effects=effects(shop))
        assert answer.status_code == 204
        with pytest.raises(AssertionError, match="one more effect: notes: 1 row added"):
            await assert_idempotent(client, "put", "/notes/3?text=x", effects=effects(shop))


def test_flask(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    examples = {
        "PUT /wallets/<owner>": {"url": "/wallets/bea", "json": {"cents": 5}},
        "GET /static/<path:filename>": None,
    }
    calls = promised(shop.app, examples)
    assert sorted(map(str, calls)) == ["GET /charges", "PUT /wallets/bea"]
    for call in calls:
        client = shop.app.test_client()
        assert_idempotent(client, call.method, call.url, effects=effects(shop), **call.options)


def test_an_effect_that_is_no_row(tmp_path: pathlib.Path) -> None:
    """A PUT that also sends a mail."""
    shop = flask_shop(tmp_path)

    def change_mail() -> Any:
        shop.mails.append("changed")
        return {}

    shop.app.add_url_rule("/mails/1", view_func=change_mail, methods=["PUT"])
    with pytest.raises(AssertionError, match=r"one more effect: effects: \+1"):
        assert_idempotent(shop.app.test_client(), "PUT", "/mails/1", effects=lambda: len(shop.mails))


def test_nothing_is_proven(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with TestClient(shop.app) as client:
        with pytest.raises(AssertionError, match=r"proves nothing:\n.*had no effect that `effects` counts"):
            assert_idempotent(client, "PUT", "/v1/wallets/anna?cents=10000", effects=effects(shop))
        with pytest.raises(AssertionError, match=r"proves nothing:\n.*answered 404"):
            assert_idempotent(client, "PUT", "/v1/nowhere", effects=effects(shop))
        with pytest.raises(Misuse, match="POST promises nothing"):
            assert_idempotent(client, "POST", "/v1/charges", effects=effects(shop))


def test_failing_the_second_time(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)

    def close(owner: str) -> Any:
        with contextlib.closing(shop.connect()) as connection, connection:
            [_] = connection.execute(
                "DELETE FROM wallets WHERE owner = ? RETURNING owner", [owner]
            ).fetchall()
        return {}

    shop.app.add_url_rule("/wallets/<owner>", view_func=close, methods=["DELETE"])
    with pytest.raises(AssertionError, match="sent again: 500"):
        assert_idempotent(shop.app.test_client(), "DELETE", "/wallets/anna", effects=effects(shop))


def test_every_route_wants_an_example(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with pytest.raises(Misuse, match=r"leave it out\) of: GET /v1/wallets/\{owner\}, PUT /v1/wallets"):
        promised(shop.app)
    with pytest.raises(Misuse, match="no route PUT /v1/walets; there are DELETE /v1/wallets/"):
        promised(shop.app, {**EXAMPLES, "PUT /v1/walets": {}})
    with pytest.raises(Misuse, match="shows no routes"):
        promised(object())


def test_routes_below_a_mount() -> None:
    endpoint = lambda request: JSONResponse({})  # noqa: E731
    routes = [
        Route("/a", endpoint, methods=["GET", "PUT"]),
        Mount("/sub", routes=[Route("/b", endpoint, methods=["HEAD"]), Route("/c", endpoint)]),
    ]
    calls = promised(Starlette(routes=routes), {"PUT /a": {"json": {}}})
    assert [str(call) for call in calls] == ["GET /a", "PUT /a", "HEAD /sub/b", "GET /sub/c"]
    assert calls[1].options == {"json": {}}
