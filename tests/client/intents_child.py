"""A program that has one order charged, stops at a named point of it, says so, and waits to be killed.

    python -m tests.client.intents_child STORE URL ORDER CENTS [POINT]

STORE: a path, or the URL of a PostgreSQL database. Points: `begun`, `remembered` (in front of the first
byte), `answered` (in front of the second write), `settled`. What it says, a line each: `stopped`, `in
progress` (at the first such answer), and at the end what came out of it, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from taptwice.client.http import Client
from taptwice.client.intents import Intent, IntentStore, Sent, Wish
from taptwice.client.outcome import Outcome
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Attempted, Ended, report
from taptwice.errors import IntentRefused

POLICY = RetryPolicy(base=0.05, cap=0.05, per_try=None, deadline=60)


def main(store: str, url: str, order: str, cents: str, point: str = "") -> None:
    def stop_at(place: str) -> None:
        if place == point:
            print("stopped", flush=True)
            threading.Event().wait()

    class Stopping(IntentStore):
        def fulfil(self, wish: Wish, send: Callable[[str], Sent[Any]]) -> Sent[Any] | Intent:
            def stopping(key: str) -> Sent[Any]:
                stop_at("remembered")
                sent = send(key)
                stop_at("answered")
                return sent

            return super().fulfil(wish, stopping)

    def listener(event: Attempted | Ended) -> None:
        if (
            isinstance(event, Attempted)
            and event.attempt.outcome is Outcome.IN_PROGRESS
            and event.number == 1
        ):
            print("in progress", flush=True)

    origin: Any = (lambda: psycopg.connect(store)) if "://" in store else store
    result: dict[str, Any] = {}
    with Client(url, intents=Stopping(origin), policy=POLICY, listeners=[listener]) as client:
        stop_at("begun")
        try:
            response = client.post("/charges", json={"order": order, "cents": int(cents)}, intent=order)
        except IntentRefused as refused:
            result["refused"] = type(refused).__name__
        else:
            result["status"] = response.status_code
            result["body"] = response.json()
            result["stored"] = not report(response).attempts
            result["replayed"] = response.headers.get("idempotent-replayed") == "true"
        stop_at("settled")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
