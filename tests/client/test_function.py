"""`retry` around functions, blocking and awaiting: both run every test here."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from taptwice.client import (
    CircuitBreaker,
    DeadlineExceeded,
    RetryBudget,
    RetryPolicy,
    StopReason,
    World,
    report,
    retry,
)
from taptwice.client.outcome import Outcome
from taptwice.client.reports import Attempted, Ended
from taptwice.client.shell import layer
from taptwice.client.testing import no_wait
from taptwice.errors import CircuitOpen, Misuse

Make = Callable[..., Callable[..., Awaitable[Any]]]


class Flaky:
    """A function that raises these one after another, and then returns what it was given."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self, value: Any = None) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return value


@pytest.fixture(params=["blocking", "awaiting"])
def make(request: pytest.FixtureRequest) -> Make:
    """Decorates a function; what comes out is awaited, whichever it is."""

    def decorate(function: Callable[..., Any], **settings: Any) -> Callable[..., Awaitable[Any]]:
        if request.param == "awaiting":

            async def awaiting(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            return retry(**settings)(awaiting)

        def blocking(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        decorated = retry(**settings)(blocking)

        async def called(*args: Any, **kwargs: Any) -> Any:
            return decorated(*args, **kwargs)

        return called

    return decorate


async def test_a_success_is_called_once(make: Make) -> None:
    flaky = Flaky()
    assert await make(flaky, on=ConnectionError)(7) == 7
    assert (flaky.calls, layer.get()) == (1, None)


async def test_failures_then_a_success(make: Make) -> None:
    flaky = Flaky(ConnectionError(), ConnectionError())
    with no_wait() as waits:
        assert await make(flaky, on=ConnectionError)(7) == 7
        assert flaky.calls == 3
        assert len(waits) == 2


async def test_the_last_exception_comes_out_as_it_is(make: Make) -> None:
    errors = [ConnectionError(str(number)) for number in range(9)]
    with no_wait(), pytest.raises(ConnectionError, match="4") as caught:
        await make(Flaky(*errors), on=ConnectionError)()
    found = report(caught.value)
    assert caught.value is errors[4]
    assert (len(found.attempts), found.stop_reason) == (5, StopReason.ATTEMPTS)
    assert caught.value.attempts == found.attempts  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [ValueError(), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("place", [0, 1])
async def test_what_is_not_named_goes_straight_through(make: Make, other: BaseException, place: int) -> None:
    errors: list[BaseException] = [ConnectionError()] * place
    flaky = Flaky(*errors, other)
    breaker = CircuitBreaker(failures=1)
    with no_wait(), pytest.raises(type(other)) as caught:
        await make(flaky, on=ConnectionError, breaker=None if place else breaker)()
    assert caught.value is other
    assert (flaky.calls, breaker.state, layer.get()) == (place + 1, "closed", None)


async def test_a_function_decides(make: Make) -> None:
    flaky = Flaky(ValueError("again"), ValueError("after 3"), ValueError("no"))

    def on(error: Exception) -> bool | float:
        return {"again": True, "after 3": 3.0}.get(str(error), False)

    with no_wait() as waits, pytest.raises(ValueError, match="no"):
        await make(flaky, on=on)()
    assert flaky.calls == 3
    assert 3.0 <= waits[1] <= 3.3


async def test_what_may_have_had_an_effect_is_not_repeated(make: Make) -> None:
    settings: dict[str, Any] = {"on": OSError, "idempotent": False}
    flaky = Flaky(ConnectionRefusedError(), ConnectionResetError())
    with no_wait(), pytest.raises(ConnectionResetError) as caught:
        await make(flaky, **settings)()
    assert flaky.calls == 2
    found = report(caught.value)
    assert (found.outcome, found.stop_reason) == (Outcome.UNKNOWN, StopReason.UNKNOWN_OUTCOME)


async def test_t41_layers_do_not_multiply(make: Make) -> None:
    flaky = Flaky(*[ConnectionError()] * 99)
    inner = retry(on=ConnectionError)(lambda: flaky())

    with no_wait(), pytest.raises(ConnectionError):
        await make(inner, on=ConnectionError, policy=RetryPolicy(max_attempts=4))()
    assert flaky.calls == 4


async def test_the_budget_is_shared_or_ones_own(make: Make) -> None:
    budget = RetryBudget(start=1)
    first, other = (Flaky(*[ConnectionError()] * 9) for _ in range(2))
    with no_wait():
        for flaky in (first, other):
            with pytest.raises(ConnectionError):
                await make(flaky, on=ConnectionError, budget=budget)()
    assert (first.calls, other.calls) == (2, 1)


async def test_an_open_circuit(make: Make) -> None:
    breaker = CircuitBreaker(failures=2, cooldown=50)
    flaky = Flaky(*[ConnectionError()] * 9)
    called = make(flaky, on=ConnectionError, breaker=breaker)
    with no_wait():
        with pytest.raises(ConnectionError) as caught:
            await called()
        assert (flaky.calls, report(caught.value).stop_reason) == (2, StopReason.CIRCUIT_OPEN)
        with pytest.raises(CircuitOpen) as refused:
            await called()
    assert 0 < refused.value.retry_after <= 50
    assert re.search(r"circuit for .+ is open, nothing was sent; again in \d+\.\d s", str(refused.value))
    assert (flaky.calls, report(refused.value).attempts) == (2, ())


async def test_a_probe_that_is_cancelled_leaves_its_place_to_the_next(make: Make) -> None:
    breaker = CircuitBreaker(failures=1, cooldown=1)
    breaker.leave(breaker.enter(0.0) or 0, False, 0.0)  # open since the clock began: the next is the probe
    flaky = Flaky(asyncio.CancelledError())
    called = make(flaky, on=ConnectionError, breaker=breaker)
    with pytest.raises(asyncio.CancelledError):
        await called()
    await called()
    assert (flaky.calls, breaker.state) == (2, "closed")


async def test_a_success_closes_the_circuits_count(make: Make) -> None:
    breaker = CircuitBreaker(failures=2)
    with no_wait():
        for _ in range(3):
            await make(Flaky(ConnectionError()), on=ConnectionError, breaker=breaker)()
    assert breaker.state == "closed"


async def test_listeners_hear_of_successes_too(make: Make) -> None:
    heard: list[Attempted | Ended] = []
    flaky = Flaky(ConnectionError())
    with no_wait():
        called = make(flaky, on=ConnectionError, listeners=[heard.append])
        assert await called(1) == await called(1) == 1
    assert [type(event) for event in heard] == [Attempted, Attempted, Ended, Attempted, Ended]
    assert flaky.calls == 3


async def test_t11_the_deadline_begins_no_wait_that_it_would_cut(make: Make) -> None:
    flaky = Flaky(*[ConnectionError()] * 9)
    policy = RetryPolicy(base=0.7, cap=0.7, deadline=1.0)
    waits: list[float] = []

    async def asleep(seconds: float) -> None:
        waits.append(seconds)

    world = World(clock=lambda: sum(waits), sleep=waits.append, asleep=asleep, draw=lambda: 1.0)
    with pytest.raises(ConnectionError) as caught:
        await make(flaky, on=ConnectionError, policy=policy, world=world)()
    assert (waits, report(caught.value).stop_reason) == ([0.7], StopReason.DEADLINE)


def test_the_name_and_the_signature_stay() -> None:
    @retry(on=OSError)
    def fetch(key: int) -> str:
        """Fetch."""
        return str(key)

    assert (fetch.__name__, fetch.__doc__, list(inspect.signature(fetch).parameters)) == (
        "fetch",
        "Fetch.",
        ["key"],
    )
    assert fetch(1) == "1"


def test_a_blocking_function_cannot_be_cut() -> None:
    with pytest.raises(Misuse, match="fetch is blocking"):

        @retry(on=OSError, interrupt=True)
        def fetch() -> None: ...


async def test_an_awaiting_function_is_cut_at_the_limit_of_an_attempt() -> None:
    calls = 0

    @retry(on=OSError, interrupt=True, policy=RetryPolicy(per_try=0.05))
    async def fetch() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()
        return calls

    with no_wait():
        assert await fetch() == 2


async def test_an_awaiting_function_is_cut_at_the_deadline() -> None:
    @retry(on=OSError, interrupt=True, policy=RetryPolicy(per_try=None, deadline=0.05))
    async def fetch() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded) as caught:
        await fetch()
    assert isinstance(caught.value, TimeoutError)
    assert report(caught.value).outcome is Outcome.UNKNOWN


def test_on_trio() -> None:
    flaky = Flaky(ConnectionError(), ConnectionError())

    @retry(on=ConnectionError, world=World(draw=lambda: 0.01))
    async def fetch() -> int:
        await trio.lowlevel.checkpoint()
        return int(flaky(7))

    assert trio.run(fetch) == 7
    assert flaky.calls == 3


async def test_a_timeout_of_the_functions_own_is_not_ours() -> None:
    @retry(on=OSError, interrupt=True, policy=RetryPolicy(deadline=None, per_try=None))
    async def fetch() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await fetch()


async def test_a_cancellation_from_outside_passes() -> None:
    begun = asyncio.Event()

    @retry(on=OSError, interrupt=True)
    async def fetch() -> None:
        begun.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(fetch())
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert call.cancelling() == 1


def test_t35_a_budget_shared_by_twenty_threads() -> None:
    # A fifth of 1000 first attempts, and an empty beginning: 1200 calls in all, where 4000 were wanted.
    budget = RetryBudget(ratio=0.2, start=0, cap=1000)
    calls = threading.Semaphore(0)

    @retry(on=ConnectionError, policy=RetryPolicy(max_attempts=4, base=0, deadline=None), budget=budget)
    def fetch() -> None:
        calls.release()
        raise ConnectionError

    def work() -> None:
        for _ in range(50):
            with pytest.raises(ConnectionError):
                fetch()

    with no_wait():
        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    count = 0
    while calls.acquire(blocking=False):
        count += 1
    assert count == 1200
