"""The gate: who waits, in what order, how many; and that a turn is never lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from taptwice.errors import InFlight
from taptwice.http.gate import AsyncGate, ThreadGate, gate_key

LONG = 60.0


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that take the turn of a key, write their number down, and leave when told."""

    def __init__(self, gate: AsyncGate) -> None:
        self.gate = gate
        self.inside: list[int] = []
        self.served: list[int] = []
        self.leave: dict[int, asyncio.Event] = {}

    def send(self, number: int, key: str = "key", wait: float = LONG) -> asyncio.Task[None]:
        self.leave[number] = asyncio.Event()
        return asyncio.create_task(self._visit(number, key, wait))

    async def _visit(self, number: int, key: str, wait: float) -> None:
        async with self.gate.turn(key, wait):
            self.inside.append(number)
            self.served.append(number)
            try:
                await self.leave[number].wait()
            finally:
                self.inside.remove(number)


async def test_one_at_a_time_in_the_order_of_arrival() -> None:
    visitors = Visitors(AsyncGate())
    tasks = [visitors.send(number) for number in range(5)]
    for number in range(5):
        await settle()
        assert visitors.inside == [number]
        visitors.leave[number].set()
    await asyncio.gather(*tasks)
    assert visitors.served == [0, 1, 2, 3, 4]
    assert not visitors.gate._queues


async def test_nobody_overtakes_at_the_moment_of_passing_on() -> None:
    visitors = Visitors(AsyncGate())
    first, second = visitors.send(1), visitors.send(2)
    await settle()
    visitors.leave[1].set()
    await asyncio.sleep(0)  # 1 is about to leave; 2 has not been told
    third = visitors.send(3)
    await settle()
    assert visitors.inside == [2]
    visitors.leave[2].set()
    visitors.leave[3].set()
    await asyncio.gather(first, second, third)
    assert visitors.served == [1, 2, 3]


async def test_other_keys_do_not_wait() -> None:
    visitors = Visitors(AsyncGate())
    tasks = [visitors.send(number, key=f"key-{number}") for number in range(5)]
    await settle()
    assert visitors.inside == [0, 1, 2, 3, 4]
    for number in range(5):
        visitors.leave[number].set()
    await asyncio.gather(*tasks)


async def test_the_turn_can_be_passed_on_early_and_only_once() -> None:
    gate = AsyncGate()
    visitors = Visitors(gate)
    async with gate.turn("key", LONG) as pass_on:
        second, third = visitors.send(2), visitors.send(3)
        await settle()
        assert visitors.inside == []
        pass_on()
        pass_on()
        await settle()
        assert visitors.inside == [2]
    await settle()
    assert visitors.inside == [2], "the end of the block passed on a turn that was given away before"
    visitors.leave[2].set()
    visitors.leave[3].set()
    await asyncio.gather(second, third)


async def test_waiting_is_refused_where_nobody_may_wait() -> None:
    gate = AsyncGate()
    async with gate.turn("key", LONG):
        with pytest.raises(InFlight):
            async with gate.turn("key", 0):
                pytest.fail("two at once")


async def test_waiting_ends_after_its_time() -> None:
    gate = AsyncGate()
    async with gate.turn("key", LONG):
        with pytest.raises(InFlight):
            async with gate.turn("key", 0.01):
                pytest.fail("two at once")
    async with gate.turn("key", 0):
        pass


async def test_waiters_are_bounded_for_a_key_and_for_the_process() -> None:
    gate = AsyncGate(per_key=3, per_process=5)
    visitors = Visitors(gate)
    tasks = [visitors.send(number, key="one") for number in range(4)]
    tasks += [visitors.send(10 + number, key="two") for number in range(3)]
    await settle()
    with pytest.raises(InFlight):
        async with gate.turn("one", LONG):  # three wait already
            pass
    with pytest.raises(InFlight):
        async with gate.turn("two", LONG):  # two wait, but five in all
            pass
    async with gate.turn("three", LONG):  # nobody to wait for
        pass
    for event in visitors.leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert gate._waiting == 0
    assert not gate._queues


def test_the_bounds_of_the_product() -> None:
    gate = AsyncGate()
    assert (gate._per_key, gate._per_process) == (128, 1024)


async def test_a_waiter_that_is_cancelled_is_passed_over() -> None:
    visitors = Visitors(AsyncGate())
    first, second, third = (visitors.send(number) for number in (1, 2, 3))
    await settle()
    second.cancel()
    visitors.leave[1].set()
    await settle()
    assert visitors.inside == [3]
    visitors.leave[3].set()
    await asyncio.gather(first, third)
    assert second.cancelled()


async def test_a_waiter_that_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    visitors = Visitors(AsyncGate())
    first, second, third = (visitors.send(number) for number in (1, 2, 3))
    await settle()
    visitors.leave[1].set()
    await first  # the turn has been given to 2, which has not run since
    second.cancel()
    await settle()
    assert visitors.inside == [3]
    visitors.leave[3].set()
    await third
    assert second.cancelled()


@pytest.mark.parametrize("seed", range(30))
async def test_no_turn_is_lost_whoever_is_cancelled_whenever(seed: int) -> None:
    """Cancels, expiring waits and early passing-on at random moments; two are never inside at once."""
    chance = random.Random(seed)
    gate = AsyncGate(per_key=50)
    inside: dict[str, int] = {"a": 0, "b": 0}
    served = 0

    async def visit(key: str, wait: float) -> None:
        nonlocal served
        async with gate.turn(key, wait) as pass_on:
            inside[key] += 1
            assert inside[key] == 1
            served += 1
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside[key] -= 1
            if chance.random() < 0.3:
                pass_on()
                await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        wait = chance.choice([LONG, LONG, 0.0005])
        tasks.append(asyncio.create_task(visit(chance.choice("ab"), wait)))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    unexpected = [each for each in results if not isinstance(each, InFlight | asyncio.CancelledError | None)]
    assert unexpected == []
    assert served > 20
    assert not gate._queues, "somebody took a turn with him"
    assert gate._waiting == 0
    await visit("a", 0)


def test_event_loops_do_not_share_a_queue() -> None:
    """A loop that died with a turn (a test's, for example) blocks nobody on the next one."""
    gate = AsyncGate()
    dead = asyncio.new_event_loop()
    held = gate.turn("key", 0)
    dead.run_until_complete(held.__aenter__())
    dead.close()

    async def visit() -> str:
        async with gate.turn("key", 0):
            return "served"

    assert asyncio.run(visit()) == "served"


# --- threads ------------------------------------------------------------------------------------------------


def waiting(gate: ThreadGate, number: int) -> None:
    """Come back when so many wait."""
    with gate._changed:
        pass
    while True:
        with gate._changed:
            if gate._waiting == number:
                return
        threading.Event().wait(0.001)


def in_threads(*calls: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_threads_take_turns() -> None:
    gate = ThreadGate(threads=64)
    inside = 0
    most = 0
    served = 0

    def visit() -> None:
        nonlocal inside, most, served
        with gate.turn("key", LONG):
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.001)
            served += 1
            inside -= 1

    for thread in in_threads(*[visit] * 20):
        thread.join()
    assert (most, served) == (1, 20)
    assert not gate._taken
    assert gate._waiting == 0


def test_at_most_half_of_the_threads_wait() -> None:
    gate = ThreadGate(threads=4)
    served: list[int] = []

    def visit() -> None:
        with gate.turn("key", LONG):
            served.append(1)

    with gate.turn("key", LONG):
        threads = in_threads(visit, visit)
        waiting(gate, 2)
        with pytest.raises(InFlight), gate.turn("key", LONG):
            pytest.fail("two at once")
        with gate.turn("other", 0):
            pass
    for thread in threads:
        thread.join()
    assert served == [1, 1]


def test_a_server_with_one_thread_never_waits() -> None:
    gate = ThreadGate(threads=1)
    with gate.turn("key", LONG), pytest.raises(InFlight), gate.turn("key", LONG):
        pytest.fail("two at once")


def test_a_thread_waits_for_its_time_and_not_at_all_where_there_is_none() -> None:
    gate = ThreadGate(threads=8)
    with gate.turn("key", LONG):
        with pytest.raises(InFlight), gate.turn("key", 0.01):
            pytest.fail("two at once")
        with pytest.raises(InFlight), gate.turn("key", 0):
            pytest.fail("two at once")
    assert gate._waiting == 0
    with gate.turn("key", 0):
        pass


def test_a_turn_is_given_up_by_an_exception() -> None:
    gate = ThreadGate(threads=2)
    with pytest.raises(ZeroDivisionError), gate.turn("key", 0):
        raise ZeroDivisionError
    with gate.turn("key", 0):
        pass


# --- keys ---------------------------------------------------------------------------------------------------


def key_of(
    *headers: tuple[bytes, bytes], method: str = "POST", path: bytes = b"/a", key: str = "k"
) -> object:
    return gate_key(method, path, headers, key)


def test_what_makes_duplicates() -> None:
    plain = key_of()
    assert plain == key_of((b"traceparent", b"00-1"), (b"date", b"now"))
    assert plain != key_of(key="l")
    assert plain != key_of(path=b"/b")
    assert plain != key_of(method="PATCH")
    assert plain != key_of((b"authorization", b"Bearer x"))
    assert plain != key_of((b"cookie", b"session=x"))
    assert key_of((b"Cookie", b"b")) == key_of((b"cookie", b"b")) != key_of((b"authorization", b"b"))


def test_no_secret_stands_in_the_key() -> None:
    assert "hush" not in repr(key_of((b"authorization", b"Bearer hush"), key="hush"))
