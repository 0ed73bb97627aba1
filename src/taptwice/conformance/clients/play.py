"""A client case under way: its steps, one method each, and what is measured."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taptwice.client.outcome import Outcome
from taptwice.client.reports import Attempted, Ended
from taptwice.conformance.clients import child, words
from taptwice.conformance.clients.broken import door_of
from taptwice.conformance.clients.doors import Asked
from taptwice.conformance.clients.measured import flat
from taptwice.conformance.clients.script import Script
from taptwice.conformance.clients.setup import Setup, Time
from taptwice.conformance.clients.subject import Called, Subject
from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case
from taptwice.conformance.run import Result, judged
from taptwice.conformance.settings import interval
from taptwice.conformance.wire import Response

PAYMENT = {"amount_cents": 5000, "currency": "eur"}


class Clients:
    """Plays the cases that are about clients, on one client, without a server of anybody's."""

    def __init__(self, door: str = "httpx2") -> None:
        """`door`: one of `taptwice.conformance.clients.doors.DOORS`."""
        self._name = door
        self._door = door_of(door)

    async def run(self, case: Case) -> Result:
        """Run one case. It never raises for what the client does."""
        if strange := words.strange(case):
            return Result(case, "failed", f"not in the language: {', '.join(strange)}")
        if reasons := list(words.not_offered(case, self._door)):
            return Result(case, "skipped", "; ".join(reasons))
        return await judged(case, self._play)

    async def _play(self, case: Case) -> Observed:
        """In a thread. Cancelled, it stops the server, which ends every call."""
        play = Play(case, self._name)
        try:
            return await asyncio.to_thread(play.run)
        finally:
            play.script.server.stop()


class Play:
    """One case under way."""

    def __init__(self, case: Case, door: str) -> None:
        self._case = case
        self._name, self._door = door, door_of(door)
        self._then = flat(case.then)
        self._marker = str(case.given.get("replay_header", "Idempotent-Replayed"))
        self.script = Script(str(case.given.get("header", "Idempotency-Key")), self._marker)
        self._time = Time(_pace(case), case.id, waiting=_waiting(case))
        self._setup = Setup(case.given)
        self._folder = Path(tempfile.mkdtemp(prefix="taptwice-conformance-"))
        self._calls: list[Called] = []
        self._by_id: dict[str, Called] = {}
        self._elapsed = 0.0
        self._wishes: dict[str, Asked] = {}
        self._before: dict[str, Any] | None = None
        """What was measured when the clock was moved, and how many probes had been made by then."""

    def _opened(self) -> Subject:
        return Subject(self._door, self._setup, self._time, self.script.server.url, self._folder, self._heard)

    def _heard(self, event: Attempted | Ended) -> None:
        if isinstance(event, Attempted) and event.attempt.outcome is Outcome.NOT_SENT:
            self.script.was_refused()

    def run(self) -> Observed:
        """All steps, and what they leave behind."""
        try:
            self._subject = self._opened()
            try:
                for step in self._case.when:
                    [(name, value)] = step.items()
                    getattr(self, f"do_{name}")(value)
                return self._observed()
            finally:
                self._subject.close()
        finally:
            self.script.server.stop()
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- steps -----------------------------------------------------------------------------------

    def do_server_script(self, steps: list[Mapping[str, Any]]) -> None:
        self.script.load(steps)

    def do_client_call(self, spec: Mapping[str, Any]) -> None:
        asked = _asked(spec)
        if asked.intent is not None:
            self._wishes[asked.intent] = asked
        if "kill_after" in spec:
            killed = spec["kill_after"]
            called = self._killed(asked, 1 if killed == "first_send" else killed)
        else:
            called = self._subject.call(asked)
        self._by_id[spec.get("id", f"call {len(self._calls) + 1}")] = called
        self._add([called])

    def do_client_calls(self, spec: Mapping[str, Any]) -> None:
        asked = [_asked({})] * spec["n"]
        between = _length(spec.get("over", 0)) / max(1, spec["n"])
        if spec.get("parallel"):
            self._add(self._subject.parallel(asked, between), together=True)
        else:
            for each in asked:
                self._add([self._subject.call(each)])
                self._time.advance(between)

    def do_client_restart(self, _: Any) -> None:
        self._subject.close()
        self._subject = self._opened()

    def do_client_resume(self, intent: str) -> None:
        if intent not in self._wishes:
            raise RuntimeError(f"nothing was asked under the intent {intent}")
        self._add([self._subject.call(self._wishes[intent])])

    def do_advance(self, duration: str) -> None:
        self._before = self._measured()
        self._time.advance(interval(duration))

    def do_sleep(self, duration: str) -> None:
        self._time.advance(interval(duration))

    def _killed(self, asked: Asked, requests: int) -> Called:
        hits = self.script.hits
        process = child.waiting()
        self.script.kill_at(requests, process)
        url = self.script.server.url
        complaint = child.tell(process, self._name, self._case.given, self._time, url, self._folder, asked)
        if not self.script.killed:
            raise RuntimeError(f"the client ended before its request {requests}: {complaint.decode()[-300:]}")
        return Called(attempts=self.script.hits - hits, error="killed")

    def _add(self, calls: list[Called], together: bool = False) -> None:
        self._calls += calls
        seconds = [call.lived.lead + call.seconds for call in calls]
        self._elapsed += max(seconds, default=0.0) if together else sum(seconds)

    # --- what is measured ------------------------------------------------------------------------

    def _observed(self) -> Observed:
        measured = self._measured()
        if self._before is not None and "after_cooldown" in self._then:
            probes = measured["probes"] - self._before["probes"]
            cooled = {"probes": probes, "state": measured["state"]}
            measured = {**self._before, "after_cooldown": cooled}
        seen = Observed(self._marker, client=measured)
        for name, called in self._by_id.items():
            seen.responses[name] = called.response or Response()
        if self._calls:
            seen.responses["result"] = self._calls[-1].response or Response()
        return seen

    def _measured(self) -> dict[str, Any]:
        script, calls, breaker = self.script, self._calls, self._subject.breaker
        requests = script.server.requests
        attempts = sum(call.attempts for call in calls)
        first = sum(call.attempts > 0 for call in calls)
        state = None if breaker is None else breaker.state.replace("probing", "half-open")
        return {
            "attempts": attempts,
            "first_attempts": first,
            "retries": attempts - first,
            "keys_distinct": len(set(script.keys) - {None}),
            "bodies_distinct": len({request.body for request in requests}),
            "server_hits": script.hits,
            "server_effects": script.effects,
            "instant_failures": sum(call.error is not None and not call.attempts for call in calls),
            "methods": [request.method for request in requests],
            "wire": list(dict.fromkeys(script.keys)),
            "error": calls[-1].error if calls else None,
            "waits_ms": [[self._ms(wait) for wait in call.lived.waits] for call in calls],
            "elapsed_ms": self._ms(self._elapsed),
            "state": state,
            "probes": 0 if breaker is None else breaker.probes,
            "after_cooldown": {},
            # A redirect that is followed is a request of its own, and no attempt.
            "unlogged": 0 if script.redirected else abs(script.hits + script.refused - attempts),
        }

    def _ms(self, seconds: float) -> float:
        return seconds * 1000 * self._time.pace


def _asked(spec: Mapping[str, Any]) -> Asked:
    method = spec.get("method", "POST")
    document = spec.get("json", PAYMENT if method in ("POST", "PUT", "PATCH") else None)
    body = None if document is None else json.dumps(document).encode()
    return Asked(method, spec.get("path", "/payments"), body, spec.get("intent"))


def _length(duration: str | float) -> float:
    return interval(duration) if isinstance(duration, str) else duration


def _pace(case: Case) -> int:
    """How many times faster time runs: a server that hangs costs real time, so the client is given less.

    But an answer must not be cut for being slow, and a Retry-After is exact.
    """
    steps = [each for step in case.steps() for each in step.get("server_script", ())]
    hangs = [each.get("do") in ("hang", "stall_body") for each in steps]
    told = any(name.lower() == "retry-after" for each in steps for name, _ in each.get("headers", ()))
    if told or not any(hangs):
        return 1
    return 8 if all(hangs) else 2


def _waiting(case: Case) -> bool:
    """Waits take no time unless a case asks for it."""
    return any(
        value.get("virtual_time") is False
        for step in case.steps()
        for value in step.values()
        if isinstance(value, Mapping)
    )
