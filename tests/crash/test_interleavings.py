"""Two requests of one key at once, their commands in every order with up to a few interruptions."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from taptwice.core.model import Answer
from taptwice.errors import InFlight, KeyReused
from taptwice.faults import Kind, crash_at, interleavings
from tests.crash import mutants
from tests.crash.worlds import CASES, Case, Database, Flow, Memory, Sqlite, World

WAITING = [
    Case(wait=10),
    Case(wait=10, savepoint=False),
    Case(wait=10, joined=True),
    Case(wait=10, raises=True),
]


@pytest.fixture
def sqlite(tmp_path: pathlib.Path) -> Iterator[Sqlite]:
    database = Sqlite(tmp_path)
    yield database
    database.close()


def found(
    database: Callable[[], Database], case: Case, flow: Flow, cuts: int | None, workers: int = 2
) -> tuple[int, list[str], Counter[str]]:
    """How many orders were run, every violation with its order, and what became of the requests."""
    orders, wrong, seen = 0, [], Counter[str]()
    for game in interleavings(lambda: World(database(), case, flow, workers), cuts):
        orders += 1
        wrong += [f"{game}: {violation}" for violation in game.world.violations(game.outcomes)]
        seen.update(type(outcome).__name__ for outcome in game.outcomes)
    return orders, wrong, seen


@pytest.mark.parametrize("case", [*CASES, *WAITING], ids=str)
def test_one_table(case: Case) -> None:
    check_on(Memory, case)


# Undone without a savepoint, an answer is saved after its lock is gone: that needs the backstop.
@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *WAITING) if case.savepoint or not case.raises], ids=str
)
def test_partitioned(case: Case) -> None:
    check_on(lambda: Memory(partitioned=True), case)


def check_on(database: Callable[[], Database], case: Case) -> None:
    orders, wrong, seen = found(database, case, Flow(), cuts=3)
    print("orders:", f"{orders}: {dict(seen)}")
    assert wrong == []
    assert orders > 100
    if case.wait:
        assert set(seen) == {"Answer"}, "who waits gets the answer"
    else:
        assert seen["Answer"] > orders, "somebody always gets it"
        assert seen["InFlight"] > 0


@pytest.mark.parametrize("case", [*CASES, *WAITING], ids=str)
def test_sqlite(case: Case, sqlite: Sqlite) -> None:
    orders, wrong, seen = found(lambda: sqlite, case, Flow(), cuts=2)
    print("orders:", f"{orders}: {dict(seen)}")
    assert wrong == []
    assert orders > 20
    assert seen["Answer"] >= orders
    if case.wait:
        assert set(seen) == {"Answer"}


def test_every_order_whatever() -> None:
    orders, wrong, seen = found(Memory, Case(savepoint=False), Flow(), cuts=None)
    print("orders:", f"{orders}: {dict(seen)}")
    assert wrong == []
    assert orders > 500


def test_three_workers() -> None:
    orders, wrong, seen = found(Memory, Case(), Flow(), cuts=2, workers=3)
    print("orders:", f"{orders}: {dict(seen)}")
    assert wrong == []
    assert orders > 1000


def test_one_of_the_two_crashes() -> None:
    """The other one cuts in at every command of one that dies at every command."""
    orders, wrong = 0, []
    for kind in (Kind.BEFORE, Kind.LOST):
        for command in range(1, 12):

            def start(command: int = command, kind: Kind = kind) -> World:
                world = World(Memory())
                doomed = crash_at(command, world.source, kind).open()
                world.workers = [(world.plan(), doomed), (world.plan(), world.source.open())]
                return world

            for game in interleavings(start, cuts=2):
                orders += 1
                wrong += [f"{game}: {violation}" for violation in game.world.violations(game.outcomes)]
    print("orders:", orders)
    assert wrong == []
    assert orders > 1000


def test_another_request_under_the_same_key() -> None:
    """Never the answer of the first: it is told 422, or 409 while the first runs."""
    for wait in (0, 10):

        def start(wait: float = wait) -> World:
            world = World(Memory(), Case(wait=wait))
            world.workers = [
                (world.plan(), world.source.open()),
                (world.plan(request=b"pay 6"), world.source.open()),
            ]
            return world

        refusals = set()
        for game in interleavings(start, cuts=3):
            refused = [type(outcome) for outcome in game.outcomes if not isinstance(outcome, Answer)]
            assert len(refused) == 1, game
            refusals.update(refused)
            assert game.world.state() == [], game
        assert refusals == ({KeyReused} if wait else {KeyReused, InFlight})


CAUGHT = [mutants.NoLock(), mutants.LateLock()]


@pytest.mark.parametrize("mutant", CAUGHT, ids=lambda mutant: type(mutant).__name__)
@pytest.mark.parametrize("cuts", [1, 2])
def test_a_mutant_is_caught(mutant: Flow, cuts: int) -> None:
    """One after the other they are right; an interruption shows them."""
    database = Memory(partitioned=True)
    assert World(database, flow=mutant).violations(()) == []
    assert found(lambda: Memory(partitioned=True), Case(), mutant, cuts=0)[1] == []
    orders, wrong, _ = found(lambda: Memory(partitioned=True), Case(), mutant, cuts)
    doubled = {violation.partition(":")[0] for violation in wrong if "more than one effect" in violation}
    print(f"doubled: in {len(doubled)} of {orders} orders")
    assert doubled


@pytest.mark.parametrize("mutant", CAUGHT, ids=lambda mutant: type(mutant).__name__)
def test_the_primary_key_is_the_backstop(mutant: Flow) -> None:
    """In one table even these double nothing: the loser's insert fails, and its work with it."""
    orders, wrong, seen = found(Memory, Case(), mutant, cuts=3)
    print("orders:", f"{orders}: {dict(seen)}")
    assert wrong == []
    assert orders > 300
    assert set(seen) <= {"Answer", "InFlight"}
