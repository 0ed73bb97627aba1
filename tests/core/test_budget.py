from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from taptwice.core.budget import GrpcThrottle, RetryBudget
from taptwice.errors import Misuse
from tests.core.meeting import Meeting


def retries(budget: RetryBudget, calls: int, wanted: int) -> int:
    """How many retries so many failing calls get, each of which wants `wanted`."""
    done = 0
    for _ in range(calls):
        budget.earn()
        for _ in range(wanted):
            if not budget.take():
                break
            done += 1
    return done


def test_of_2000_wanted_retries_109_are_made() -> None:
    """S-166: 10 to start with, 0.1 for each of 999 calls (the first finds it full): 109.9."""
    budget = RetryBudget()
    assert retries(budget, calls=1000, wanted=2) == 109
    assert budget.tokens == 0.9


def test_ten_tenths_are_one_retry() -> None:
    budget = RetryBudget(start=0)
    for _ in range(10):
        assert not budget.take()
        budget.earn()
    assert budget.take()
    assert not budget.take()


def test_what_is_saved_is_bounded() -> None:
    budget = RetryBudget(ratio=0.5, start=0, cap=3)
    for _ in range(100):
        budget.earn()
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_a_full_budget_is_left_alone() -> None:
    budget = RetryBudget()
    budget._lock = cast(Any, None)  # to take it would be an error
    budget.earn()
    assert budget.tokens == 10


def test_the_last_retry_is_not_given_to_two_at_once() -> None:
    budget, meeting = RetryBudget(), Meeting()

    class Counted(int):
        """Tokens that take a while to count."""

        def __lt__(self, other: int) -> bool:
            meeting.middle()
            return int(self) < other

    budget._lock, budget._tokens = cast(Any, meeting), Counted(1000)
    assert meeting.of(budget.take) == (True, False)


def test_what_two_earn_at_once_is_counted_twice() -> None:
    budget, meeting = RetryBudget(start=0), Meeting()

    class Read(int):
        """Tokens to which it takes a while to add."""

        def __add__(self, other: int) -> int:
            found = int(self) + other
            meeting.middle()
            return found

    budget._lock, budget._tokens = cast(Any, meeting), Read(0)
    meeting.of(budget.earn)
    assert budget.tokens == 0.2


def test_a_budget_of_nothing_allows_nothing() -> None:
    assert retries(RetryBudget(ratio=0, start=0, cap=0), calls=100, wanted=3) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": 0.0001}, "thousandths"),
        ({"cap": float("inf")}, "cap"),
        ({"start": 11}, "start=11 is more than cap=10"),
        ({"start": 0, "cap": 0.5}, "cap=0.5 never holds one"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, float], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        RetryBudget(**settings)


# --- threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def by_threads(work: Callable[[], int], threads: int) -> int:
    """The sum of what the threads return, which begin together."""
    barrier = threading.Barrier(threads)
    results: list[int] = []

    def run() -> None:
        barrier.wait()
        results.append(work())

    all_ = [threading.Thread(target=run) for _ in range(threads)]
    for each in all_:
        each.start()
    for each in all_:
        each.join()
    assert len(results) == threads
    return sum(results)


@pytest.mark.usefixtures("impatient")
def test_load_is_bounded_by_the_ratio_whoever_calls() -> None:
    """T35 a: 1,000 failing calls of 20 threads that want 3 retries each make 1,200 requests, not 4,000."""
    budget = RetryBudget(ratio=0.2, start=0)
    done = by_threads(lambda: retries(budget, calls=50, wanted=3), threads=20)
    assert done + budget.tokens == pytest.approx(200), "nothing earned is lost, nothing is spent twice"
    assert 1000 + done <= 1200
    assert budget.tokens < 4, "less than a token is left to each thread"


@pytest.mark.usefixtures("impatient")
def test_who_earns_on_success_makes_no_retry_in_an_outage() -> None:
    """T35 b: exactly 1,000 requests."""
    budget = RetryBudget(ratio=0.2, start=0)
    assert by_threads(lambda: sum(budget.take() for _ in range(50)), threads=20) == 0


# --- gRPC ---------------------------------------------------------------------------------------------------


def failing_call(throttle: GrpcThrottle, attempts: int = 4) -> int:
    for made in range(1, attempts + 1):
        if not throttle.failed():
            return made
    return attempts


def test_six_failing_calls_under_grpc_throttling() -> None:
    """T34, the attempts that grpcio makes."""
    throttle = GrpcThrottle(max_tokens=10, ratio=0.1)
    assert [failing_call(throttle) for _ in range(6)] == [4, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("successes", "attempts"), [(50, 1), (51, 2), (61, 3)])
def test_so_many_successes_allow_a_retry_again(successes: int, attempts: int) -> None:
    throttle = GrpcThrottle(max_tokens=10, ratio=0.1)
    for _ in range(6):
        failing_call(throttle)
    assert throttle.tokens == 1
    for _ in range(successes):
        throttle.succeeded()
    assert failing_call(throttle) == attempts


def test_a_small_grpc_throttle() -> None:
    throttle = GrpcThrottle(max_tokens=4, ratio=0.5)
    assert [failing_call(throttle) for _ in range(4)] == [2, 1, 1, 1]
    assert throttle.tokens == 0, "never below nothing"


def test_a_full_grpc_throttle_is_left_alone() -> None:
    throttle = GrpcThrottle()
    with throttle._lock:
        throttle.succeeded()
    assert throttle.tokens == 10


@pytest.mark.usefixtures("impatient")
def test_a_grpc_throttle_shared_by_threads() -> None:
    throttle = GrpcThrottle(max_tokens=1000, ratio=0.1)

    def fails() -> int:
        return sum(throttle.failed() for _ in range(20))

    assert by_threads(fails, threads=20) == 400
    assert throttle.tokens == 600


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"max_tokens": 1001}, {"ratio": 0}, {"ratio": -1}, {"ratio": 0.0001}]
)
def test_settings_that_grpc_refuses(settings: dict[str, float]) -> None:
    with pytest.raises(Misuse):
        GrpcThrottle(**settings)
