"""The retry plan on paper: every decision and every wait, without a socket and without waiting."""

from __future__ import annotations

import random
import socket
import ssl
import statistics
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from taptwice.client.outcome import Outcome, Seen, of_error
from taptwice.client.plan import Call, StopReason, retrying, stop
from taptwice.client.policy import RetryPolicy
from taptwice.core.budget import RetryBudget
from taptwice.core.plan import Plan
from taptwice.errors import Misuse
from tests.client.fake import C0, Play, answer, problem

UNKNOWN = Seen(Outcome.UNKNOWN, error=ConnectionResetError())
NOT_SENT = Seen(Outcome.NOT_SENT, error=ConnectionRefusedError())
LOST = Seen(Outcome.PROCESSED, error=EOFError())


def draws(seed: int) -> Callable[[], float]:
    chance = random.Random(seed)
    return lambda: 1.0 - chance.random()


# --- waiting ------------------------------------------------------------------------------------------------


def test_t01_two_refusals_then_an_answer() -> None:
    play = Play([answer(503), answer(503), answer(200)])
    assert (play.waits, play.log, play.call.stop) == ([0.1, 0.2], [503, 503, 200], StopReason.ANSWERED)


def test_the_defaults_are_those_of_the_documentation() -> None:
    policy = RetryPolicy()
    assert (policy.max_attempts, policy.deadline, policy.per_try) == (5, 10.0, 2.0)
    assert [policy.wait(n, None, 1.0) for n in range(1, 7)] == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_t02_jitter_survives_the_cap() -> None:
    u = draws(1)
    waits = [C0.wait(8, None, u()) for _ in range(2000)]
    assert abs(statistics.mean(waits) - 0.5) < 0.03
    assert abs(statistics.stdev(waits) - 0.289) < 0.02
    assert min(waits) < 0.02
    assert sum(wait == C0.cap for wait in waits) < 20


def test_t02_notices_a_jitter_that_is_clamped_after_the_draw() -> None:
    u = draws(1)
    waits = [min(C0.cap, u() * C0.base * 2**7) for _ in range(2000)]  # the mutant
    assert sum(wait == C0.cap for wait in waits) > 20


@pytest.mark.parametrize("status", [429, 503])
def test_t03_retry_after_is_a_lower_bound(status: int) -> None:
    for seed in range(500):
        play = Play([answer(status, {"Retry-After": "2"}), answer(200)], u=draws(seed))
        [wait] = play.waits
        assert 2.0 <= wait <= 2.5


@pytest.mark.parametrize(
    "form", ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"]
)
def test_t04_the_three_forms_of_a_date(form: str) -> None:
    date = time.strftime(form, time.gmtime(time.time() + 3))
    [wait] = Play([answer(503, {"Retry-After": date}), answer(200)]).waits
    assert 2.0 <= wait <= 3.6


def test_a_wrong_clock_here_does_not_matter() -> None:
    then, there = formatdate(9e8 + 3, usegmt=True), formatdate(9e8, usegmt=True)
    [wait] = Play([answer(503, {"Retry-After": then, "Date": there}), answer(200)]).waits
    assert wait == pytest.approx(3.3)


@pytest.mark.parametrize("value", ["0", formatdate(1e9, usegmt=True), "soon", "-5", "", "NaN"])
def test_t06_what_cannot_be_used_falls_back_to_jitter(value: str) -> None:
    [wait] = Play([answer(503, {"Retry-After": value}), answer(200)], u=draws(3)).waits
    assert 0 < wait <= 0.1


def test_t06_a_fraction_is_not_rounded_down() -> None:
    [wait] = Play([answer(503, {"Retry-After": "1.5"}), answer(200)], u=draws(3)).waits
    assert wait >= 1.5


def test_t08_too_long_means_stop_and_never_an_early_retry() -> None:
    policy = C0.replace(deadline=None)
    play = Play([answer(429, {"Retry-After": "86400"}), answer(200)], policy)
    assert (play.waits, play.log) == ([], [429])
    assert (play.call.stop, play.seen.retry_after) == (StopReason.RETRY_AFTER_TOO_LONG, 86400)


def test_t07_longer_than_the_deadline() -> None:
    play = Play([answer(429, {"Retry-After": "86400"}), answer(200)])
    assert (play.waits, play.log) == ([], [429])
    assert play.call.stop is StopReason.RETRY_AFTER_EXCEEDS_DEADLINE


def test_a_retry_after_without_an_end() -> None:
    play = Play([answer(503, {"Retry-After": "9" * 400}), answer(200)], C0.replace(deadline=None))
    assert play.call.stop is StopReason.RETRY_AFTER_TOO_LONG


def test_the_number_of_failures_may_be_large() -> None:
    assert RetryPolicy().wait(100_000, None, 1.0) == 5.0


# --- the deadline -------------------------------------------------------------------------------------------


def test_t11_no_wait_is_begun_that_the_deadline_would_cut() -> None:
    policy = C0.replace(base=0.7, cap=0.7, deadline=1.0)
    play = Play([answer(503)], policy)
    assert play.begins == [100.0, 100.7]
    assert (play.now, play.call.stop) == (100.7, StopReason.DEADLINE)


def test_t11_notices_a_deadline_that_is_each_attempts_own() -> None:
    def mutant(call: Call, seen: Seen) -> Plan[Seen]:
        plan = retrying(call, seen)
        command = next(plan)
        try:
            while True:
                call.end = play_now() + 1.0
                command = plan.send((yield command))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    play: list[Play] = []

    def play_now() -> float:
        return 100.0 if not play else play[0].now

    class Kept(Play):
        def execute(self, command: Any) -> Any:
            play[:] = [self]
            return super().execute(command)

    mutated = Kept([answer(503)], C0.replace(base=0.7, cap=0.7, deadline=1.0), plan=mutant)
    assert len(mutated.begins) > 2


def test_an_attempt_that_used_the_time_up_is_the_last() -> None:
    play = Play([UNKNOWN], C0.replace(deadline=1.0), took=1.0)
    assert (len(play.log), play.call.stop) == (1, StopReason.DEADLINE)


def test_a_wait_that_took_longer_than_asked_is_followed_by_no_attempt() -> None:
    class Late(Play):
        def execute(self, command: Any) -> Any:
            reply = super().execute(command)
            if self.commands[-1] == "Wait":
                self.now += 10
            return reply

    late = Late([answer(503)])
    assert (len(late.log), late.call.stop) == (1, StopReason.DEADLINE)


# --- what may be repeated -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 409, 410, 412, 413, 415, 422, 501, 505])
def test_t10_final_statuses(status: int) -> None:
    play = Play([answer(status), answer(200)], method="POST", key="k")
    assert (play.log, play.call.stop) == ([status], None)  # without a plan


@pytest.mark.parametrize(
    ("first", "keyless", "keyed"),
    [
        (answer(429, {"Retry-After": "1"}), 2, 2),
        (answer(408), 2, 2),
        (answer(425), 2, 2),
        (answer(500), 1, 2),
        (answer(502), 1, 2),
        (answer(503), 1, 2),
        (answer(504), 1, 2),
        (problem(503, "store-unavailable"), 2, 2),
        (problem(503, "contention"), 2, 2),
        (problem(503, "commit-unknown"), 1, 2),
        (NOT_SENT, 2, 2),
        (UNKNOWN, 1, 2),
        (LOST, 1, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_t21_the_outcome_the_method_and_the_key_decide(
    first: Seen, keyless: int, keyed: int, method: str
) -> None:
    for key, attempts in ((None, keyless), ("k", keyed)):
        assert len(Play([first, answer(201)], method=method, key=key).log) == attempts
    assert len(Play([first, answer(200)], method="PUT").log) == 2


def test_d309_a_post_without_a_key_says_why_it_was_not_repeated() -> None:
    assert Play([UNKNOWN], method="POST").call.stop is StopReason.UNKNOWN_OUTCOME


def test_d300_a_saved_500_that_is_replayed_is_final() -> None:
    replayed = answer(500, {"Idempotent-Replayed": "true"})
    assert Play([replayed, answer(201)], method="POST", key="k").log == [500]


def test_what_can_never_go_well_is_not_repeated() -> None:
    play = Play([Seen(Outcome.NOT_SENT, error=ssl.SSLCertVerificationError(), permanent=True)])
    assert (len(play.log), play.call.stop) == (1, StopReason.PERMANENT)


def test_t31_a_body_that_can_be_read_once() -> None:
    play = Play([answer(503), answer(200)], method="PUT", replayable=False)
    assert (play.log, play.call.stop) == ([503], StopReason.BODY_NOT_REPLAYABLE)


def test_t42_the_server_says_whether() -> None:
    no = Play([answer(503, {"x-should-retry": "false"}), answer(200)])
    assert (no.log, no.call.stop) == ([503], StopReason.SERVER_SAYS_NO)
    obeying = C0.replace(obey_should_retry=True)
    yes = answer(400, {"x-should-retry": "true"}, policy=obeying)
    assert Play([yes, answer(200)], obeying).log == [400, 200]
    assert Play([answer(400, {"x-should-retry": "true"}), answer(200)]).log == [400]


def test_a_layer_around_us_retries() -> None:
    play = Play([answer(503), answer(200)], single=True)
    assert (play.log, play.call.stop) == ([503], StopReason.SINGLE_ATTEMPT)


def test_attempts_are_counted() -> None:
    play = Play([answer(503)])
    assert (play.log, play.call.stop) == ([503] * 4, StopReason.ATTEMPTS)


# --- in progress --------------------------------------------------------------------------------------------


def test_t26_in_progress_costs_nothing() -> None:
    waiting = problem(409, "in-progress", {"Retry-After": "1"})
    budget = RetryBudget()
    play = Play([waiting, waiting, answer(201)], method="POST", key="k", budget=budget, enter=lambda: False)
    assert play.log == [409, 409, 201]
    assert all(wait >= 1.0 for wait in play.waits)
    assert budget.tokens == 10
    assert not {"Take", "Enter"} & set(play.commands)


def test_polls_do_not_count_as_attempts_under_a_deadline() -> None:
    waiting = problem(409, "in-progress", {"Retry-After": "1"})
    play = Play([waiting] * 20 + [answer(201)], C0.replace(deadline=60.0), method="POST", key="k")
    assert play.log[-1] == 201
    endless = Play([waiting], C0.replace(deadline=None), method="POST", key="k")
    assert (len(endless.log), endless.call.stop) == (4, StopReason.ATTEMPTS)


@pytest.mark.parametrize(
    "other",
    [
        problem(409, "seat-taken"),
        answer(409, {"Content-Type": "text/plain"}),
        answer(409, None, {"title": "no type"}),
        answer(409, None, {"type": "https://elsewhere.example/in-progress"}),
        answer(409, {"Content-Type": "application/json"}, None),
    ],
    ids=range(5),
)
def test_t27_every_other_409_is_an_answer(other: Seen) -> None:
    assert Play([other, answer(201)], method="POST", key="k").log == [409]


def test_a_409_by_a_field_that_was_configured() -> None:
    policy = C0.replace(in_progress=(("error.code", "key_in_use"),))
    waiting = answer(409, None, {"error": {"code": "key_in_use"}}, policy=policy)
    assert Play([waiting, answer(201)], policy, method="POST", key="k").log == [409, 201]
    other = answer(409, None, {"error": "key_in_use"}, policy=policy)
    assert Play([other, answer(201)], policy, method="POST", key="k").log == [409]


# --- budget and breaker -------------------------------------------------------------------------------------


def test_the_budget_is_taken_before_the_wait() -> None:
    play = Play([answer(503)], budget=RetryBudget(start=1))
    assert (play.log, play.call.stop) == ([503, 503], StopReason.BUDGET)
    assert len(play.waits) == 1
    assert play.commands.index("Take") < play.commands.index("Wait")


def test_d313_a_thousand_failing_calls_that_want_two_retries_make_109() -> None:
    budget = RetryBudget()
    retries = 0
    for _ in range(1000):
        budget.earn()
        retries += len(Play([answer(503)], C0.replace(max_attempts=3), budget=budget).log) - 1
    assert retries == 109


def test_a_circuit_that_opens_ends_the_calls_own_retries() -> None:
    replies = iter([True, False])
    play = Play([answer(503)], enter=lambda: next(replies))
    assert (play.log, play.call.stop) == ([503, 503], StopReason.CIRCUIT_OPEN)


def test_the_order_of_a_round() -> None:
    play = Play([answer(503), answer(200)])
    assert play.commands == ["Now", "Draw", "Take", "Wait", "Now", "Enter", "Again", "Now"]


@pytest.mark.parametrize("place", range(7))
def test_an_error_of_the_shells_passes_through(place: int) -> None:
    class Interrupted(Play):
        def execute(self, command: Any) -> Any:
            if len(self.commands) == place:
                raise KeyboardInterrupt
            return super().execute(command)

    with pytest.raises(KeyboardInterrupt):
        Interrupted([answer(503)])


# --- errors -------------------------------------------------------------------------------------------------


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ConnectTimeout(Exception):
    pass


class ChunkedEncodingError(Exception):
    pass


class Wrapper(Exception):
    def __init__(self, reason: Exception) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError(), Outcome.NOT_SENT),
        (chained(OSError(), socket.gaierror()), Outcome.NOT_SENT),
        (Wrapper(ConnectTimeout()), Outcome.NOT_SENT),
        (Exception("outer", ConnectTimeout()), Outcome.NOT_SENT),
        (OSError(113, "no route"), Outcome.NOT_SENT),
        (ChunkedEncodingError(), Outcome.PROCESSED),
        (ConnectionResetError(), Outcome.UNKNOWN),
        (TimeoutError(), Outcome.UNKNOWN),
        (BrokenPipeError(), Outcome.UNKNOWN),
    ],
    ids=repr,
)
def test_without_a_watcher_the_names_decide(error: Exception, outcome: Outcome) -> None:
    assert of_error(error).outcome is outcome


def test_what_was_seen_is_stronger_than_any_name() -> None:
    refused = ConnectionRefusedError()
    assert of_error(refused, wrote=True).outcome is Outcome.UNKNOWN
    assert of_error(refused, head=True, wrote=True).outcome is Outcome.PROCESSED
    assert of_error(ConnectionResetError(), wrote=False).outcome is Outcome.NOT_SENT


def test_a_suppressed_context_is_no_evidence() -> None:
    with pytest.raises(TimeoutError) as caught:
        try:
            raise ConnectionRefusedError
        except ConnectionRefusedError:
            raise TimeoutError from None
    assert of_error(caught.value).outcome is Outcome.UNKNOWN


def test_a_chain_with_a_loop_ends() -> None:
    one, other = Exception(), Exception()
    one.__cause__, other.__cause__ = other, one
    assert of_error(one).outcome is Outcome.UNKNOWN


def test_a_certificate_is_not_sent_and_permanent() -> None:
    seen = of_error(chained(OSError(), ssl.SSLCertVerificationError()))
    assert (seen.outcome, seen.permanent) == (Outcome.NOT_SENT, True)


# --- the policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"base": -1.0},
        {"cap": float("inf")},
        {"deadline": 0.0},
        {"per_try": float("nan")},
        {"key_quoting": "quoted"},
        {"attempts": 3},
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match=next(iter(wrong))):
        RetryPolicy().replace(**wrong)


def test_stop_is_pure() -> None:
    call = Call(C0, 0.0)
    assert stop(call, answer(503), 0.0) is None
    assert call.attempts == []
