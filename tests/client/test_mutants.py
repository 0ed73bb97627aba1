"""The client broken in one place: a case must notice. What no case notices is not tested."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taptwice.client import aiohttp, bodies, calls, exchange, outcome, shell, transports
from taptwice.client import requests as ours_requests
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import Call, StopReason, Take, Wait, retrying
from taptwice.core.budget import RetryBudget
from taptwice.core.plan import Plan
from tests.client.cases import CASES
from tests.client.doors import DOORS
from tests.client.fake import C0, Play, answer

Break = Callable[[pytest.MonkeyPatch], None]


def no_positive_marker(patch: pytest.MonkeyPatch) -> None:
    """Nobody saw a write, so nothing was sent."""
    real = outcome.of_error
    patch.setattr(aiohttp, "of_error", lambda error, head: real(error, head, False))


def a_file_is_not_rewound(patch: pytest.MonkeyPatch) -> None:
    def pieces(file: Any, start: int) -> Iterator[bytes]:
        while piece := file.read(65536):
            yield piece

    patch.setattr(bodies, "_pieces", pieces)


def a_head_may_be_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ours_requests._Connection, "response_class", http.client.HTTPResponse)


def a_body_is_the_callers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exchange, "_is_small", lambda response: False)


def a_409_is_in_progress(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcome, "_read", lambda policy, body: ("in-progress", True))


def no_bodies_count_as_replayable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bodies.Body, "replayable", property(lambda self: True, lambda self, value: None))


def a_deadline_is_each_attempts_own(patch: pytest.MonkeyPatch) -> None:
    real = shell.Going._start

    def start(going: shell.Going) -> Any:
        deadline = going.call.policy.deadline
        if deadline is not None:
            going.call.end = going.world.clock() + deadline
        return real(going)

    patch.setattr(shell.Going, "_start", start)


def in_progress_costs_a_retry(patch: pytest.MonkeyPatch) -> None:
    def costly(call: Call, seen: Seen) -> Plan[Seen]:
        return retrying(call, seen._replace(outcome=Outcome.UNKNOWN))

    patch.setattr(shell, "retrying", costly)


def the_limit_of_an_attempt_is_no_limit(patch: pytest.MonkeyPatch) -> None:
    real = Limit.__init__
    patch.setattr(Limit, "__init__", lambda self, end, clock: real(self, end + 1, clock))


def a_stream_is_the_readers_from_its_head_on(patch: pytest.MonkeyPatch) -> None:
    def concluded(going: Any, lib: Any, seen: Seen, request: Any, once: Any, *, typed: bool) -> Any:
        return exchange.conclude(going, lib, seen, request, typed=typed)

    patch.setattr(calls, "concluded", concluded)
    patch.setattr(transports, "concluded", concluded)


@pytest.mark.parametrize(
    ("case", "door", "broken"),
    [
        ("T19", "aiohttp middleware", no_positive_marker),
        ("T31", "httpx2 Client", a_file_is_not_rewound),
        ("T31", "httpx2 AsyncClient", a_file_is_not_rewound),
        ("T31c", "httpx2 Client", no_bodies_count_as_replayable),
        ("T23", "requests adapter", a_head_may_be_cut),
        ("T24", "httpx2 transport", a_body_is_the_callers),
        ("T27", "httpx2 Client", a_409_is_in_progress),
        ("T27", "requests adapter", a_409_is_in_progress),
        ("T11", "httpx2 Client", a_deadline_is_each_attempts_own),
        ("T26", "httpx2 Client", in_progress_costs_a_retry),
        ("T32b", "httpx2 Client", a_stream_is_the_readers_from_its_head_on),
        ("T32b", "httpx2 async transport", a_stream_is_the_readers_from_its_head_on),
        ("T15", "httpx2 Client", the_limit_of_an_attempt_is_no_limit),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).replace(" ", "-"),
)
def test_a_case_notices(case: str, door: str, broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    [run] = [each.run for each in CASES if each.name == case]
    [through] = [each for each in DOORS if each.name == door]
    broken(monkeypatch)
    with pytest.raises((AssertionError, Exception)):
        run(through)


def test_t36_notices_a_budget_that_is_taken_after_the_wait() -> None:
    def late(call: Call, seen: Seen) -> Plan[Seen]:
        plan = retrying(call, seen)
        command = next(plan)
        try:
            while True:
                if isinstance(command, Take):
                    command = plan.send(True)
                    continue
                reply = yield command
                if isinstance(command, Wait) and not (yield Take()):
                    call.stop = StopReason.BUDGET
                    return seen
                command = plan.send(reply)
        except StopIteration as end:
            result: Seen = end.value
            return result

    mutated = Play([answer(503)], C0, budget=RetryBudget(start=1), plan=late)
    assert len(mutated.waits) == 2
    assert len(Play([answer(503)], C0, budget=RetryBudget(start=1)).waits) == 1
