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
from typing import Any

import httpx2
import psycopg

from taptwice.client.intents import Intent, IntentStore, Sent, Wish, fingerprint_of
from taptwice.core.model import Answer
from taptwice.errors import IntentRefused


def main(store: str, url: str, order: str, cents: str, point: str = "") -> None:
    def stop_at(place: str) -> None:
        if place == point:
            print("stopped", flush=True)
            threading.Event().wait()

    body = json.dumps({"order": order, "cents": int(cents)}).encode()

    def send(key: str) -> Sent[httpx2.Response]:
        stop_at("remembered")
        told = False
        while True:
            answer = httpx2.post(url, content=body, headers={"Idempotency-Key": key}, timeout=60)
            if answer.status_code != 409:
                break
            if not told:
                print("in progress", flush=True)
            told = True
            threading.Event().wait(0.05)  # the server lets us ask again; nothing else tells us when
        stop_at("answered")
        final = answer.status_code < 500
        kept = Answer(answer.status_code, tuple(answer.headers.multi_items()), answer.content)
        return Sent(answer, kept if final else None)

    origin: Any = (lambda: psycopg.connect(store)) if "://" in store else store
    intents = IntentStore(origin)
    stop_at("begun")
    result: dict[str, Any] = {}
    try:
        done = intents.fulfil(Wish(order, fingerprint_of("POST", url, body), lasts=60), send)
    except IntentRefused as refused:
        result["refused"] = type(refused).__name__
    else:
        stored, answer = isinstance(done, Intent), done.answer
        assert answer is not None
        replayed = not stored and answer.header("idempotent-replayed") == "true"
        result.update(status=answer.status, body=answer.json(), stored=stored, replayed=replayed)
    stop_at("settled")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
