from __future__ import annotations

import json

import pytest

from taptwice import errors
from taptwice.core.problems import PROBLEMS, problem
from taptwice.errors import (
    CommitUnknown,
    InFlight,
    KeyInvalid,
    KeyReused,
    Misuse,
    RequestError,
    StoreUnavailable,
    TaptwiceError,
    Torn,
    Unfinished,
)

CLIENTS = (errors.CircuitOpen, errors.IntentRefused)
"""Raised to the caller of a client; no server answers with them."""
CLASSES: list[type[TaptwiceError]] = [
    cls for name in errors.__all__ if not issubclass(cls := getattr(errors, name), CLIENTS)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_problem_type(cls: type[TaptwiceError]) -> None:
    words = PROBLEMS[cls.problem]
    assert all((words.title, words.meaning, words.remedy))
    status, headers, body = problem(cls())
    document = json.loads(body)
    assert headers == (("Content-Type", "application/problem+json"),)
    assert list(document) == ["type", "title", "status", "detail"]
    assert document["type"] == f"https://taptwice.dev/problems/{cls.problem}"
    assert document["title"] == words.title
    assert document["status"] == status == cls.status


def test_every_problem_type_has_an_error() -> None:
    assert set(PROBLEMS) == {cls.problem for cls in CLASSES}


def test_the_caller_reads_what_to_correct() -> None:
    _, _, body = problem(KeyInvalid("The Idempotency-Key header is empty."))
    assert json.loads(body)["detail"] == "The Idempotency-Key header is empty."
    assert json.loads(problem(InFlight())[2])["detail"] == InFlight.__doc__


@pytest.mark.parametrize("cls", [TaptwiceError, Misuse, Unfinished, Torn, StoreUnavailable, CommitUnknown])
def test_the_caller_does_not_read_our_internals(cls: type[TaptwiceError]) -> None:
    _, _, body = problem(cls("table records on db-7.internal: set pool_size"), status=400)
    words = PROBLEMS[cls.problem]
    assert json.loads(body)["detail"] == f"{words.meaning} {words.remedy}"
    assert b"db-7" not in body


def test_status_and_base_are_the_service_s_choice() -> None:
    status, _, body = problem(KeyReused(), base="https://pay.example/errors#", status=409)
    assert status == json.loads(body)["status"] == 409
    assert json.loads(body)["type"] == "https://pay.example/errors#key-reused"


def test_extension_members_add_and_never_replace() -> None:
    _, _, body = problem(
        KeyReused("other"), extra={"status": 200, "type": "x", "instance": "/p/1", "ü": "ü\ud800"}
    )
    document = json.loads(body)
    assert document["status"] == 422
    assert document["type"].endswith("/key-reused")
    assert document["instance"] == "/p/1"
    assert document["ü"] == "ü\ud800"
    assert body.isascii()


def test_an_error_of_somebody_else_s_making() -> None:
    class OutOfStock(RequestError):
        """Nothing is left."""

        status = 410
        problem = "out-of-stock"

    status, _, body = problem(OutOfStock())
    assert status == 410
    assert json.loads(body) == {
        "type": "https://taptwice.dev/problems/out-of-stock",
        "title": PROBLEMS["error"].title,
        "status": 410,
        "detail": "Nothing is left.",
    }
