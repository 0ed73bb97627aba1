"""Every command of every plan: crash before it, after it, its reply lost, the connection broken before it."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from taptwice.core.model import Answer
from taptwice.errors import TaptwiceError
from taptwice.faults import Crash, Kind, every
from tests.crash import mutants
from tests.crash.worlds import CASES, Case, Database, Flow, Memory, Postgres, Sqlite, World


def found(
    database: Callable[[], Database],
    case: Case,
    flow: Flow,
    in_a_row: int,
    kinds: Sequence[Kind] = tuple(Kind),
    apart: bool = True,
) -> tuple[int, list[str]]:
    """How many schedules were run, and every violation with its schedule."""
    schedules, wrong = 0, []
    for trial in every(lambda: World(database(), case, flow), in_a_row, kinds, apart=apart):
        schedules += 1
        wrong += [f"{trial}: {violation}" for violation in trial.attempt.violations(trial.outcomes)]
    return schedules, wrong


@pytest.fixture
def sqlite(tmp_path: pathlib.Path) -> Iterator[Sqlite]:
    database = Sqlite(tmp_path)
    yield database
    database.close()


@pytest.fixture(params=[False, True], ids=["one-table", "partitioned"])
def postgres(fresh_postgres: str, request: pytest.FixtureRequest) -> Iterator[Postgres]:
    database = Postgres(fresh_postgres, partitioned=request.param)
    yield database
    database.close()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("partitioned", [False, True], ids=["one-table", "partitioned"])
def test_memory(case: Case, partitioned: bool) -> None:
    schedules, wrong = found(lambda: Memory(partitioned), case, Flow(), in_a_row=2)
    print("schedules:", schedules)
    assert wrong == []
    assert schedules > 500


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sqlite(case: Case, sqlite: Sqlite) -> None:
    schedules, wrong = found(lambda: sqlite, case, Flow(), in_a_row=1)
    twice, more = found(lambda: sqlite, case, Flow(), in_a_row=2, kinds=(Kind.AFTER, Kind.LOST))
    print("schedules:", schedules + twice)
    assert wrong + more == []
    assert schedules > 25
    assert twice > 150


@pytest.mark.parametrize("case", CASES, ids=str)
def test_postgresql(case: Case, postgres: Postgres) -> None:
    schedules, wrong = found(lambda: postgres, case, Flow(), in_a_row=1)
    # And with the statements in pipelines, as they are sent.
    piped, more = found(lambda: postgres, case, Flow(), in_a_row=1, apart=False)
    print("schedules:", schedules + piped)
    assert wrong + more == []
    assert schedules > 25
    assert piped > 10


def test_three_in_a_row() -> None:
    schedules, wrong = found(Memory, Case(), Flow(), in_a_row=3, kinds=(Kind.LOST,))
    print("schedules:", schedules)
    assert wrong == []
    assert schedules > 400


@pytest.mark.parametrize("case", [Case(tears=True), Case(tears=True, savepoint=False)], ids=str)
def test_torn(case: Case, sqlite: Sqlite) -> None:
    """Work that its handler commits itself can come apart from the record; a record never from its work."""
    for database in (Memory, lambda: sqlite):
        trials = 0
        for trial in every(lambda: World(database(), case)):  # noqa: B023
            trials += 1
            assert "a record without its effect" not in trial.attempt.state(), trial
            answer = trial.retry()
            assert trial.retry() == answer, trial
            assert "more than one record" not in trial.attempt.state(), trial
        assert trials > 20
    if case.savepoint:  # without one, SQLite cannot tell; PostgreSQL knows by the transaction's beginning
        world = World(sqlite, case)
        assert world() == world() == Answer(201, (), b"1")


def test_a_crash_leaves_no_transaction_open() -> None:
    trials = 0
    for trial in every(lambda: World(Memory())):
        trials += 1
        database = trial.attempt.database
        assert isinstance(database, Memory)
        assert (database.database.transactions, database.database.locks) == ([], {}), trial
    assert trials > 20


def test_what_each_kind_of_fault_looks_like() -> None:
    kinds = Counter(
        (trial.faults[0].kind, type(outcome))
        for trial in every(lambda: World(Memory()))
        for outcome in trial.outcomes
    )
    assert kinds[Kind.BEFORE, Crash] == kinds[Kind.AFTER, Crash] > 5
    assert all(kind in (Kind.LOST, Kind.REFUSED) for kind, seen in kinds if issubclass(seen, TaptwiceError))
    assert not any(issubclass(seen, Answer) for kind, seen in kinds)


CAUGHT_BY_A_FAULT = [
    (mutants.RecordAfterCommit(), Case(), "more than one effect"),
    (mutants.RecordFirst(), Case(), "a record without its effect"),
    (mutants.ReleaseOnError(), Case(), "more than one effect"),
    (mutants.NotUndone(), Case(raises=True), "an effect that was to be undone"),
    (mutants.AnyRequest(), Case(), "another request got the answer of this one"),
    (mutants.NoAccount(), Case(), "another account got the answer of this one"),
]


@pytest.mark.parametrize(("mutant", "case", "symptom"), CAUGHT_BY_A_FAULT, ids=lambda v: type(v).__name__)
def test_a_mutant_is_caught(mutant: Flow, case: Case, symptom: str) -> None:
    schedules, wrong = found(Memory, case, mutant, in_a_row=1)
    print("violations:", f"{len(wrong)} in {schedules}")
    assert any(symptom in violation for violation in wrong), wrong


@pytest.mark.parametrize(
    "mutant", [mutants.RecordAfterCommit(), mutants.RecordFirst(), mutants.ReleaseOnError()]
)
def test_without_a_fault_they_look_right(mutant: Flow) -> None:
    """Why faults are needed: these three pass every test of somebody who does not inject any."""
    assert World(Memory(), flow=mutant).violations(()) == []
