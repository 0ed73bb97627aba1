"""The circuit breaker: every state that four calls and a clock can bring it to; then threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from taptwice.core.breaker import Circuit, CircuitBreaker, Rules, closed, enter, leave
from taptwice.errors import CircuitOpen, Misuse
from tests.core.meeting import Meeting

Enter = Callable[[Circuit, Rules, float], tuple[Circuit, int | None]]
Leave = Callable[[Circuit, Rules, int, bool | None, float], Circuit]

# --- every state --------------------------------------------------------------------------------------------

RULES = Rules(failures=3, cooldown=2, growth=2, longest=8, lease=5)
OUTCOMES = (True, False, None)
CALLS = 4
NO_PROBE = -1.0
OLD = 1


@dataclass(frozen=True, slots=True)
class World:
    """A circuit, its clock and the calls under way: each with its ticket and the end of its probe's lease."""

    circuit: Circuit
    now: float = 0.0
    calls: tuple[tuple[int, float], ...] = ()

    def normal(self) -> World:
        """The same to anybody who sees how much time is left, and of a ticket only whether it is current.

        Tickets grow, as `check_leaving` checks, so that an old one stays old.
        """
        circuit, now = self.circuit, self.now
        calls = sorted(
            (OLD + (ticket == circuit.ticket), end if end == NO_PROBE else max(0.0, end - now))
            for ticket, end in self.calls
        )
        return World(replace(circuit, ticket=OLD + 1, until=max(0.0, circuit.until - now)), 0.0, tuple(calls))


class Violation(AssertionError):
    """A rule of the breaker is broken."""


def must(holds: bool, rule: str) -> None:
    if not holds:
        raise Violation(rule)


def after(world: World, enter: Enter, leave: Leave) -> Iterator[World]:
    """What may happen next, each with the rules that must hold then."""
    circuit, now = world.circuit, world.now
    if circuit.state != "closed":
        yield replace(world, now=now + 1)  # nothing depends on the time in a closed circuit
    if len(world.calls) < CALLS:
        entered, ticket = enter(circuit, RULES, now)
        probe = entered.state == "probing"
        if ticket is not None:
            must(probe or circuit.state == "closed", "nobody calls through an open circuit")
            must(not (probe and any(end > now for _, end in world.calls)), "one probe at a time")
            must(circuit.state == "closed" or now >= circuit.until, "no probe before the cool-down is over")
            lease = now + RULES.lease if probe else NO_PROBE
            yield World(entered, now, (*world.calls, (ticket, lease)))
        else:
            must(entered == circuit, "who is refused changes nothing")
            must(circuit.state != "closed", "a closed circuit refuses nobody")
    for place, (ticket, lease) in enumerate(world.calls):
        others = world.calls[:place] + world.calls[place + 1 :]
        for outcome in OUTCOMES:
            left = leave(circuit, RULES, ticket, outcome, now)
            check_leaving(circuit, left, outcome, of_probe=lease != NO_PROBE)
            yield World(left, now, others)


def check_leaving(before: Circuit, left: Circuit, outcome: bool | None, *, of_probe: bool) -> None:
    if (before.state, left.state) == ("closed", "open"):
        must(
            outcome is False and before.failures == RULES.failures - 1, "so many failures open it, not fewer"
        )
    if before.state != "closed" and left.state == "closed":
        must(of_probe and outcome is True and before.state == "probing", "only a probe's success closes it")
    if (before.state, left.state) == ("probing", "open") and outcome is False:
        must(left.cooldown == min(RULES.longest, 2 * before.cooldown), "it stays open longer each time")
    must(left.ticket >= before.ticket, "no ticket is given twice")
    must(left.state == "closed" or left.failures > 0, "0 failures is the sign of a circuit without trouble")
    must(RULES.cooldown <= left.cooldown <= RULES.longest, "the cool-down keeps its bounds")


def check_is_never_stuck(world: World, enter: Enter) -> None:
    later = world.now + RULES.longest + RULES.lease
    must(
        enter(world.circuit, RULES, later)[1] is not None,
        "after a while a call may go, whoever never came back",
    )


def explore(enter: Enter = enter, leave: Leave = leave) -> tuple[int, int]:
    """Go everywhere; how many states there are, and how many ways between them."""
    start = World(closed(RULES)).normal()
    seen, todo, ways = {start}, [start], 0
    while todo:
        world = todo.pop()
        check_is_never_stuck(world, enter)
        for following in after(world, enter, leave):
            ways += 1
            if (known := following.normal()) not in seen:
                seen.add(known)
                todo.append(known)
    return len(seen), ways


def test_every_state_keeps_the_rules() -> None:
    assert explore() == (440, 3863), "as many states, and ways between them, as were looked at before"


def no_gate(circuit: Circuit, rules: Rules, now: float) -> tuple[Circuit, int | None]:
    """Half open as many have it: everybody is let through once the cool-down is over."""
    if circuit.state == "probing":
        return circuit, circuit.ticket
    return enter(circuit, rules, now)


def lease_without_end(circuit: Circuit, rules: Rules, now: float) -> tuple[Circuit, int | None]:
    if circuit.state == "probing":
        return circuit, None
    return enter(circuit, rules, now)


def early(circuit: Circuit, rules: Rules, now: float) -> tuple[Circuit, int | None]:
    return enter(circuit, rules, now + 1)


def heeds_strangers(circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float) -> Circuit:
    return leave(circuit, rules, circuit.ticket, outcome, now)


def neutral_keeps_the_slot(
    circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float
) -> Circuit:
    """A cancelled probe leaves a lease without end."""
    if outcome is None and circuit.state == "probing" and ticket == circuit.ticket:
        return replace(circuit, until=float("inf"))
    return leave(circuit, rules, ticket, outcome, now)


def neutral_closes(circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float) -> Circuit:
    return leave(circuit, rules, ticket, True if outcome is None else outcome, now)


def never_longer(circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float) -> Circuit:
    return leave(circuit, replace(rules, growth=1), ticket, outcome, now)


def one_too_early(circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float) -> Circuit:
    return leave(circuit, replace(rules, failures=1), ticket, outcome, now)


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        ({"enter": no_gate}, "one probe at a time"),
        ({"enter": lease_without_end}, "after a while a call may go"),
        ({"enter": early}, "no probe before"),
        ({"leave": heeds_strangers}, "only a probe's success"),
        ({"leave": neutral_keeps_the_slot}, "after a while a call may go"),
        ({"leave": neutral_closes}, "only a probe's success"),
        ({"leave": never_longer}, "longer each time"),
        ({"leave": one_too_early}, "so many failures"),
    ],
)
def test_a_mutant_is_caught(mutant: dict[str, Any], rule: str) -> None:
    with pytest.raises(Violation, match=rule):
        explore(**mutant)


# --- by the clock -------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=5, cooldown=1, clock=clock)


def state(breaker: CircuitBreaker) -> str:
    """Not the attribute itself, of which a type checker believes that it stays as it was seen last."""
    return breaker.state


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        ticket = breaker.enter()
        assert ticket is not None
        breaker.leave(ticket, False)


def test_failures_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    fail(breaker, 4)
    ticket = breaker.enter()
    assert ticket is not None
    breaker.leave(ticket, True)
    fail(breaker, 4)
    assert state(breaker) == "closed"
    fail(breaker)
    assert state(breaker) == "open"
    assert breaker.enter() is None
    assert breaker.retry_after() == 1


def test_open_for_longer_each_time_and_as_at_first_after_a_success(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    fail(breaker, 5)
    waits = []
    for _ in range(8):
        waits.append(breaker.retry_after())
        clock.now += waits[-1]
        assert breaker.retry_after() == 0
        fail(breaker)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 60
    probe = breaker.enter()
    assert probe is not None
    breaker.leave(probe, True)
    assert (state(breaker), breaker.retry_after()) == ("closed", 0)
    fail(breaker, 5)
    assert breaker.retry_after() == 1


def test_an_outage_through_a_breaker(clock: Clock) -> None:
    """D-314: of 100 calls a failing server sees 6; after the cool-down one probe finds it well."""
    breaker = CircuitBreaker(failures=6, cooldown=30, clock=clock)
    sent = refused = 0
    for _ in range(100):
        if (ticket := breaker.enter()) is None:
            refused += 1
        else:
            sent += 1
            breaker.leave(ticket, False)
    assert (sent, refused, breaker.state) == (6, 94, "open")
    clock.now += 31
    probe = breaker.enter()
    assert probe is not None
    assert breaker.enter() is None
    breaker.leave(probe, True)
    assert state(breaker) == "closed"


def test_a_cancelled_probe_leaves_its_place_to_the_next(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 5)
    clock.now += 1
    with pytest.raises(asyncio.CancelledError), breaker.attempt():
        raise asyncio.CancelledError
    assert state(breaker) == "open"
    with breaker.attempt():
        assert state(breaker) == "probing"
    assert state(breaker) == "closed"


def test_a_probe_that_never_comes_back(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 5)
    clock.now += 1
    lost = breaker.enter()
    assert lost is not None
    assert breaker.retry_after() == 30
    clock.now += 30
    second = breaker.enter()
    assert second is not None
    breaker.leave(lost, True)
    assert state(breaker) == "probing", "its place was taken: what it found is of yesterday"
    breaker.leave(second, False)
    assert breaker.retry_after() == 2


def test_calls_from_before_the_opening_move_nothing(breaker: CircuitBreaker, clock: Clock) -> None:
    slow = [breaker.enter() for _ in range(3)]
    fail(breaker, 5)
    for ticket, outcome in zip(slow, OUTCOMES, strict=True):
        assert ticket is not None
        breaker.leave(ticket, outcome)
    assert (state(breaker), breaker.retry_after()) == ("open", 1)
    clock.now += 1
    probe = breaker.enter()
    assert probe is not None
    breaker.leave(probe, True)
    assert state(breaker) == "closed"


def test_the_callers_own_reading_of_the_clock_is_taken(breaker: CircuitBreaker) -> None:
    fail(breaker, 5)
    assert breaker.retry_after(now=100.25) == 0.75
    assert breaker.enter(now=100.5) is None
    probe = breaker.enter(now=101)
    assert probe is not None
    breaker.leave(probe, False, now=102)
    assert breaker.retry_after(now=102) == 2


# --- as a block ---------------------------------------------------------------------------------------------


def test_a_block_that_raises_is_a_failure_unless_it_says_otherwise(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        with pytest.raises(ValueError), breaker.attempt():
            raise ValueError
    assert state(breaker) == "open"
    with pytest.raises(CircuitOpen) as refused, breaker.attempt():
        raise AssertionError("not reached")
    assert refused.value.retry_after == 1


def test_a_block_may_say_what_it_saw(breaker: CircuitBreaker) -> None:
    for _ in range(6):
        with pytest.raises(LookupError), breaker.attempt() as attempt:
            attempt.outcome = None
            raise LookupError("no such charge, which is an answer")
    assert state(breaker) == "closed"
    for _ in range(5):
        with breaker.attempt() as attempt:
            attempt.outcome = False
    assert state(breaker) == "open"


async def test_a_block_that_awaits(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(5):
        with pytest.raises(OSError):
            async with breaker.attempt():
                raise OSError
    with pytest.raises(CircuitOpen):
        async with breaker.attempt():
            raise AssertionError("not reached")
    clock.now += 1
    async with breaker.attempt():
        await asyncio.sleep(0)
    assert state(breaker) == "closed"


# --- many at once -------------------------------------------------------------------------------------------


def together(work: Callable[[], None], threads: int = 20) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    all_ = [threading.Thread(target=run) for _ in range(threads)]
    for each in all_:
        each.start()
    for each in all_:
        each.join()
    assert failed == []


def test_a_closed_circuit_lets_all_work_at_the_same_time(breaker: CircuitBreaker) -> None:
    """T37: no lock is held in the call. Each waits inside for all the others."""
    inside = threading.Barrier(20)

    def call() -> None:
        with breaker.attempt():
            inside.wait(timeout=30)

    together(call)
    assert state(breaker) == "closed"


def test_who_comes_while_the_probe_is_let_in_is_refused(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 5)
    clock.now += 1
    meeting = Meeting()

    class Slow:
        """Rules, of which the last word takes a while."""

        @property
        def lease(self) -> float:
            meeting.middle()
            return 30.0

    breaker._lock, breaker._rules = cast(Any, meeting), cast(Any, Slow())
    probe, refused = meeting.of(breaker.enter)
    assert refused is None
    assert (probe, state(breaker)) == (breaker._circuit.ticket, "probing")


def test_of_20_threads_one_is_the_probe(breaker: CircuitBreaker, clock: Clock) -> None:
    """T37: the probe ends, and fails, when 19 others were refused."""
    fail(breaker, 5)
    clock.now += 1
    probes, refused = [], threading.Semaphore(0)
    begin = threading.Barrier(20)

    def call() -> None:
        begin.wait()
        ticket = breaker.enter()
        if ticket is None:
            refused.release()
            return
        probes.append(ticket)
        for _ in range(19):
            assert refused.acquire(timeout=30)
        breaker.leave(ticket, False)

    together(call)
    assert len(probes) == 1
    assert (state(breaker), breaker.retry_after()) == ("open", 2)


async def test_of_20_tasks_one_is_the_probe(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 5)
    clock.now += 1
    outcomes: list[str] = []
    all_refused = asyncio.Event()

    async def call() -> None:
        try:
            async with breaker.attempt():
                await all_refused.wait()
                outcomes.append("probe")
        except CircuitOpen:
            outcomes.append("refused")
            if len(outcomes) == 19:
                all_refused.set()

    async with asyncio.timeout(30):
        await asyncio.gather(*(call() for _ in range(20)))
    assert outcomes == ["refused"] * 19 + ["probe"]
    assert state(breaker) == "closed"


def test_a_circuit_without_trouble_takes_no_lock(breaker: CircuitBreaker) -> None:
    breaker._lock = cast(Any, None)  # to take it would be an error
    with breaker.attempt():
        pass
    assert (state(breaker), breaker.enter()) == ("closed", 1)


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"failures": 0}, "failures=0"),
        ({"cooldown": 0}, "cooldown=0"),
        ({"cooldown": 61}, "not above longest=60"),
        ({"longest": float("inf")}, "longest"),
        ({"growth": 0.5}, "growth"),
        ({"lease": 0}, "lease"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        CircuitBreaker(**settings)
