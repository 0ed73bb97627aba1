"""The scripted server of the client cases: the words of `server_script` on real sockets.

Step k of the script answers request k; the last one goes on. A server that is to refuse the next connection
stops listening before it sends the answer of the step before, so nobody can come too early.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from subprocess import Popen
from types import TracebackType
from typing import Any, NamedTuple

from taptwice.client.testing import Peer, ScriptedServer
from taptwice.conformance.settings import interval
from taptwice.core.problems import PROBLEMS

OURS = "https://taptwice.dev/problems/"
THEIRS = "https://example.com/problems/"

DEEDS = frozenset(["work", "work_then_drop", "drop", "replay_or_work", "hang", "stall_body", "refuse"])

Lines = tuple[tuple[str, str], ...]


class _Answer(NamedTuple):
    status: int
    lines: Lines
    body: bytes


class Script:
    """A server with a script, and what it did. Entered with ``with``."""

    def __init__(self, key_header: str, marker: str) -> None:
        self.effects = 0
        self.refused = 0
        """Connections that a client tried to make while nobody listened."""
        self.redirected = False
        """Whether an answer sent a client elsewhere."""
        self.killed = False
        self._key_header = key_header
        self._marker = marker
        self._saved: dict[str, _Answer] = {}
        self._steps: list[Mapping[str, Any]] = [{"do": "work"}]
        self._at = 0
        self._left = 1
        self._prey: Popen[bytes] | None = None
        self._fatal = 0
        self._turn = threading.Lock()
        self.server = ScriptedServer([self._serve])

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()

    @property
    def hits(self) -> int:
        """Requests that came."""
        return len(self.server.requests)

    @property
    def keys(self) -> list[str | None]:
        """The key of each request, as it stood on the wire."""
        return [request.header(self._key_header) for request in self.server.requests]

    def load(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Answer by these steps from now on."""
        self._steps = list(steps)
        self._at, self._left = 0, self._repeat()
        self.server.refuse()
        if self._deed() != "refuse":
            self.server.listen()

    def was_refused(self) -> None:
        """A client could not connect: the script goes on."""
        with self._turn:
            if self._deed() != "refuse":
                return
            self.refused += 1
            _ = self._next()
            if self._deed() != "refuse":
                self.server.listen()

    def kill_at(self, request: int, process: Popen[bytes]) -> None:
        """Kill this process at the so-manieth request from now, after its work and before its answer."""
        self._prey, self._fatal, self.killed = process, self.hits + request, False

    # --- the script ------------------------------------------------------------------------------

    def _repeat(self) -> int:
        return int(self._steps[self._at].get("repeat", 1))

    def _deed(self) -> str:
        return str(self._steps[self._at].get("do", ""))

    def _next(self) -> Mapping[str, Any]:
        """The step that it is at; the script moves on."""
        step = self._steps[self._at]
        self._left -= 1
        if self._left < 1 and self._at + 1 < len(self._steps):
            self._at += 1
            self._left = self._repeat()
        return step

    def _serve(self, peer: Peer) -> None:
        with self._turn:
            deed = self._deed()
            step = self._next()
            answer = self._answer(step, peer)
            last = self._deed() == "refuse"
            if last:
                self.server.refuse()
        if self._prey is not None and self.hits >= self._fatal:
            self.killed = self._prey.poll() is None
            self._prey.kill()
            _ = self._prey.wait()
            self._prey = None
        if deed == "hang":
            peer.wait_until_gone()
        elif answer is None:
            peer.close()
        else:
            self._send(peer, answer, last, stall=deed == "stall_body")

    def _answer(self, step: Mapping[str, Any], peer: Peer) -> _Answer | None:
        """What to answer, after the work if there is any. None: hang up, or say nothing."""
        deed = step.get("do")
        if deed is None:
            return self._scripted(step)
        key = peer.request.header(self._key_header)
        if deed in ("drop", "hang", "refuse"):
            return None
        if deed == "replay_or_work" and key in self._saved:
            status, lines, body = self._saved[key]
            return _Answer(status, (*lines, (self._marker, "true")), body)
        answer = self._work(step, peer)
        if key is not None:
            self._saved.setdefault(key, answer)
        return None if deed == "work_then_drop" else answer

    def _work(self, step: Mapping[str, Any], peer: Peer) -> _Answer:
        self.effects += 1
        try:
            asked = json.loads(peer.request.body)
        except ValueError:
            asked = None
        known = {"amount_cents", "currency"} & asked.keys() if isinstance(asked, dict) else ()
        made = {"id": f"pay_{self.effects}", **{name: asked[name] for name in sorted(known)}}
        usual = 201 if peer.request.method == "POST" else 200
        lines = (("Content-Type", "application/json"), ("Location", f"/payments/{made['id']}"))
        return _Answer(int(step.get("status", usual)), (*lines, *_headers(step)), json.dumps(made).encode())

    def _scripted(self, step: Mapping[str, Any]) -> _Answer:
        status, lines = int(step["status"]), _headers(step)
        self.redirected = self.redirected or any(name.lower() == "location" for name, _ in lines)
        if "problem" in step:
            name = step["problem"]
            kind = f"{OURS if name in PROBLEMS else THEIRS}{name}"
            document = json.dumps({"type": kind, "status": status, **step.get("json", {})})
            return _Answer(status, (("Content-Type", "application/problem+json"), *lines), document.encode())
        if "json" in step:
            kept = json.dumps(step["json"]).encode()
            return _Answer(status, (("Content-Type", "application/json"), *lines), kept)
        return _Answer(status, lines, str(step.get("body", "")).encode())

    def _send(self, peer: Peer, answer: _Answer, last: bool, stall: bool) -> None:
        status, lines, body = answer
        phrase = HTTPStatus(status).phrase if status in list(HTTPStatus) else ""
        if status not in (204, 304):
            lines = (*lines, ("Content-Length", str(len(body))))
        if last:
            lines = (*lines, ("Connection", "close"))
        head = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in lines), "", ""]
        silent = peer.request.method == "HEAD" or status in (204, 304)
        sent = b"" if silent else body[: len(body) // 2] if stall else body
        peer.send("\r\n".join(head).encode("latin-1") + sent)
        if stall:
            peer.wait_until_gone()
        elif last:
            peer.close()


def _headers(step: Mapping[str, Any]) -> Lines:
    return tuple((str(name), filled(str(value))) for name, value in step.get("headers", ()))


def filled(text: str) -> str:
    """The words in braces, {now+2s} and {http_date:+2s}, as they are when the answer is sent."""

    def word(found: re.Match[str]) -> str:
        moment = time.time() + interval(found[0])
        return formatdate(moment, usegmt=True) if found[1] == "http_date:" else str(int(moment))

    return re.sub(r"\{(now|http_date:)(?:\+[0-9a-z.]+)?\}", word, text)
