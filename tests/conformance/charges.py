"""A small service that owes nothing to taptwice: charges, kept in a dictionary, each key once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Charges(ThreadingHTTPServer):
    """`fingerprint` False: it forgets to compare what was asked for."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, fingerprint: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fingerprint = fingerprint
        self.lock = threading.Lock()
        self.answers: dict[tuple[str, str], tuple[Any, bytes]] = {}
        self.charged: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Charges

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        account = self.headers.get("Authorization", "")
        keys = self.headers.get_all("Idempotency-Key", [])
        key = keys[0].strip().strip('"') if keys else ""
        if account not in ("Bearer secret-a", "Bearer secret-b"):
            return self.refuse(401, "unauthorized")
        if self.path != "/v1/charges":
            return self.refuse(404, "not-found")
        if not keys:
            return self.refuse(400, "key-missing")
        if len(keys) > 1 or not key or "," in key or len(key) > 255:
            return self.refuse(400, "key-invalid")
        try:
            asked = json.loads(body)
        except ValueError:
            return self.refuse(400, "not-json")
        if type(asked.get("amount")) is not int or "source" not in asked:
            return self.refuse(422, "invalid-charge")
        with self.server.lock:
            known = self.server.answers.get((account, key))
            if known is None:
                self.server.charged.append(asked)
                made = json.dumps({"id": f"ch_{len(self.server.charged)}", "amount": asked["amount"]})
                self.server.answers[account, key] = (asked, made.encode())
                return self.answer(200, made.encode())
        if self.server.fingerprint and known[0] != asked:
            return self.refuse(422, "key-reused")
        return self.answer(200, known[1], replayed=True)

    def refuse(self, status: int, problem: str) -> None:
        document = {"type": f"https://charges.example/{problem}", "title": problem, "status": status}
        self.answer(status, json.dumps(document).encode(), "application/problem+json")

    def answer(
        self, status: int, body: bytes, kind: str = "application/json", replayed: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if replayed:
            self.send_header("Idempotent-Replayed", "true")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def charges(fingerprint: bool = True) -> Iterator[Charges]:
    """The service, running."""
    server = Charges(fingerprint)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
