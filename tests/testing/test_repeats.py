"""`assert_once` on services that are good, and on those it is to find."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from typing import Any

import httpx2
import pytest
from flask import request
from starlette.testclient import TestClient

from taptwice.core.header import KeySyntax
from taptwice.core.policy import Policy
from taptwice.errors import Misuse
from taptwice.testing import Effects, assert_once
from tests.testing.shops import Shop, by_hand, check_then_insert, fastapi_shop, flask_shop

CHARGE: dict[str, Any] = {"json": {"cents": 100, "note": "x"}}


def effects(shop: Shop) -> Effects:
    return Effects(shop.connect, "charges", "wallets", "SELECT sum(cents) FROM charges")


def rows(shop: Shop, table: str = "charges") -> int:
    with contextlib.closing(shop.connect()) as connection:
        found: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return found


def test_flask(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    with shop.app.test_client() as client:
        answer = assert_once(client, "POST", "/charges", effects=effects(shop), **CHARGE)
    assert (answer.status_code, answer.get_json()) == (201, {"charge_id": 1})
    assert rows(shop) == 11, "one in turn, and one in each round of five at once"


def test_wsgi_over_httpx(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    with httpx2.Client(transport=httpx2.WSGITransport(shop.app), base_url="http://shop") as client:
        answer = assert_once(client, "POST", "/charges", effects=effects(shop), **CHARGE)
    assert (answer.status_code, rows(shop)) == (201, 11)


def test_starlettes_client(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with TestClient(shop.app) as client:
        answer = assert_once(client, "POST", "/v1/charges", effects=effects(shop), **CHARGE)
    assert (answer.status_code, rows(shop)) == (201, 11)


async def test_a_client_that_awaits(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        counted = effects(shop)
        answer = await assert_once(client, "POST", "/charges", effects=counted, at_once=9, rounds=2, **CHARGE)
    assert (answer.status_code, rows(shop)) == (201, 3)


def test_a_check_before_the_insert_passes_in_turn_and_fails_at_once(tmp_path: pathlib.Path) -> None:
    shop = check_then_insert(tmp_path, at_once=5)
    client = shop.app.test_client()
    assert_once(client, "POST", "/charges", effects=effects(shop), at_once=1, **CHARGE)
    assert rows(shop) == 1


def test_and_at_once_it_says_how_often_it_happened(tmp_path: pathlib.Path) -> None:
    shop = check_then_insert(tmp_path, at_once=5)
    with pytest.raises(AssertionError) as failed:
        assert_once(shop.app.test_client(), "POST", "/charges", effects=effects(shop), **CHARGE)
    text = str(failed.value)
    assert text.startswith("POST /charges does not happen once:\n  5 at once: ")
    assert "answers without Idempotent-Replayed: expected 1, found 5" in text
    assert "effect: expected charges: 1 row added; SELECT sum(cents) FROM charges: +100, found " in text
    assert "found charges: 5 rows added; SELECT sum(cents) FROM charges: +500" in text
    assert "sent again" not in text, "in turn nothing is wrong"


def test_a_race_that_shows_later(tmp_path: pathlib.Path) -> None:
    """It is a matter of luck, here of the third round."""
    for rounds, found in ((2, False), (3, True)):
        folder = tmp_path / str(rounds)
        folder.mkdir()
        shop = check_then_insert(folder, at_once=5, racing_from=4)
        outcome = pytest.raises(AssertionError, match="5 at once") if found else contextlib.nullcontext()
        with outcome:
            client = shop.app.test_client()
            assert_once(client, "POST", "/charges", effects=effects(shop), rounds=rounds, **CHARGE)
        assert rows(shop) == (1 + 2 + 5 if found else 1 + 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"wait": 0},  # whoever is told 409 at once asks again
        {"key": KeySyntax(strict=True)},
        {"key": KeySyntax(names=("X-Request-Key", "Idempotency-Key"))},
        {"key_pointer": "/meta/key"},
        {"status": {"key-reused": 400}},
        {"replay_header": "X-Again", "replay_allow": ("Location",)},
    ],
    ids=str,
)
async def test_each_policy(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    shop = fastapi_shop(tmp_path, **changes)
    policy = Policy(**changes)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        counted = effects(shop)
        await assert_once(client, "POST", "/charges", effects=counted, policy=policy, **CHARGE)
        if changes.keys() & {"status", "replay_header", "key_pointer"}:
            with pytest.raises(AssertionError):
                await assert_once(client, "POST", "/charges", effects=counted, **CHARGE)


@pytest.mark.parametrize("streams", ["pass", "capture"])
async def test_a_stream(tmp_path: pathlib.Path, streams: str) -> None:
    """What is remembered without its body is replayed without it; what is captured, whole."""
    shop = fastapi_shop(tmp_path, streams=streams)
    counted, policy = effects(shop), Policy(streams=streams)  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        answer = await assert_once(client, "POST", "/streams", effects=counted, policy=policy, **CHARGE)
        assert answer.text == "charged"


def test_headers_that_are_saved(tmp_path: pathlib.Path) -> None:
    """A replay with another Location is found; one with another Date is what it must be."""
    shop = flask_shop(tmp_path)
    numbers = iter(range(1000))

    def moved(response: Any) -> Any:
        response.headers["Location"] = response.headers["X-Number"] = f"/{next(numbers)}"
        return response

    shop.app.after_request(moved)
    with pytest.raises(AssertionError) as failed:
        assert_once(shop.app.test_client(), "POST", "/charges", effects=effects(shop), at_once=1, **CHARGE)
    assert str(failed.value).endswith("sent again: location: expected '/0', found '/1'")


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        ("works and refuses", "changed, same key: an effect: charges: 1 row added"),
        (
            "another body",
            "sent again: body: expected b'{\"charge_id\":1}\\n', found b'{\"charge_id\":-1}\\n'",
        ),
        (
            "another body the fifth time",
            "body: expected b'{\"charge_id\":2}\\n', found b'{\"charge_id\":-1}\\n'",
        ),
        ("another status the second time", "5 at once: status: expected 201 as in turn, found 200"),
        ("marked", "sent again: Idempotent-Replayed is on the first answer, to a key that is new"),
    ],
)
def test_each_defect(tmp_path: pathlib.Path, defect: str, found: str) -> None:
    """What is written by hand and good passes; each single defect is found, and named."""
    for folder in ("good", "bad"):
        (tmp_path / folder).mkdir()
    shop = by_hand(tmp_path / "good")
    assert_once(shop.app.test_client(), "POST", "/charges", effects=effects(shop), **CHARGE)
    shop = by_hand(tmp_path / "bad", defect)
    with pytest.raises(AssertionError) as failed:
        assert_once(shop.app.test_client(), "POST", "/charges", effects=effects(shop), **CHARGE)
    assert found in str(failed.value)


def test_what_is_not_keyed_at_all(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with TestClient(shop.app) as client, pytest.raises(AssertionError) as failed:
        assert_once(client, "PUT", "/v1/notes/1?text=x", effects=Effects(shop.connect, "notes"))
    text = str(failed.value)
    assert "sent again: Idempotent-Replayed is missing on 200" in text
    assert "sent again: one more effect: notes: 1 row added" in text
    assert "changed, same key: expected 422 key-reused, found 200" in text
    assert "5 at once: effect: expected notes: 1 row added, found notes: 5 rows added" in text


def test_nothing_is_proven_without_an_effect(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    counted = Effects(shop.connect, "notes")
    with pytest.raises(AssertionError, match=r"proves nothing:\n.*had no effect that `effects` counts"):
        assert_once(shop.app.test_client(), "POST", "/charges", effects=counted, **CHARGE)
    with pytest.raises(AssertionError, match=r"proves nothing:\n.*first request failed: 500"):
        assert_once(shop.app.test_client(), "POST", "/charges", effects=counted, json={})


@pytest.mark.parametrize(
    ("method", "path", "line"),
    [
        ("POST", "/chagres", "the first request was answered 404: is the path right?"),
        ("PATCH", "/charges", "the first request was answered 405: is the method right?"),
    ],
)
def test_a_first_answer_that_nobody_meant(tmp_path: pathlib.Path, method: str, path: str, line: str) -> None:
    shop = flask_shop(tmp_path)
    with pytest.raises(AssertionError) as failed:
        assert_once(shop.app.test_client(), method, path, effects=effects(shop), **CHARGE)
    assert str(failed.value).splitlines()[1].strip() == line


def test_what_the_client_raises_is_raised(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    shop.app.testing = True
    with pytest.raises(KeyError, match="cents"):
        assert_once(shop.app.test_client(), "POST", "/charges", effects=effects(shop), json={})


def test_another_request_that_the_service_would_refuse_anyway(tmp_path: pathlib.Path) -> None:
    shop = check_then_insert(tmp_path, at_once=5)

    def validate() -> Any:
        return None if request.get_json()["cents"] == 100 else ({"detail": "cents"}, 422)

    shop.app.before_request(validate)
    client = shop.app.test_client()
    with pytest.raises(AssertionError, match="refused before its key was looked at: 422"):
        assert_once(client, "POST", "/charges", effects=effects(shop), at_once=1, **CHARGE)


def test_another_request_as_the_test_says(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    body: dict[str, Any] = {"data": b'{"cents": 5}', "headers": {"Content-Type": "application/json"}}
    with pytest.raises(Misuse, match="say what another request would be"):
        assert_once(client, "POST", "/charges", effects=effects(shop), **body)
    assert_once(client, "POST", "/charges", effects=effects(shop), changed={"data": b'{"cents": 6}'}, **body)


def test_an_effect_is_more_than_a_number_of_rows(tmp_path: pathlib.Path) -> None:
    """An update that is done twice leaves as many rows; what it did to them shows it."""
    shop = flask_shop(tmp_path)

    def again() -> Any:
        with contextlib.closing(shop.connect()) as connection, connection:
            connection.execute("UPDATE wallets SET cents = cents - 5")
        return {}, 201, {"Idempotent-Replayed": "true"}

    shop.app.add_url_rule("/again", view_func=again, methods=["POST"])
    counted = Effects(shop.connect, "wallets")
    with pytest.raises(AssertionError, match=r"one more effect: wallets: 1 row changed, column 2 by -5"):
        assert_once(shop.app.test_client(), "POST", "/again", effects=counted, at_once=1)
    with pytest.raises(AssertionError, match=r"expected .*column 2 by -5, found .*column 2 by -25"):
        assert_once(shop.app.test_client(), "POST", "/again", effects=counted)


def test_effects_that_await_for_a_client_that_does_not(tmp_path: pathlib.Path) -> None:
    import aiosqlite

    shop = flask_shop(tmp_path)
    counted = Effects(lambda: aiosqlite.connect(tmp_path / "shop.db"), "charges")
    with pytest.raises(Misuse, match="a connection which blocks"):
        assert_once(shop.app.test_client(), "POST", "/charges", effects=counted, **CHARGE)


def test_no_client() -> None:
    with pytest.raises(Misuse, match=r"cannot send through sqlite3.Connection"):
        assert_once(sqlite3.connect(":memory:"), "POST", "/", effects=lambda: 1)  # type: ignore[call-overload]
