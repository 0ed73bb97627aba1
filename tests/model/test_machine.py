"""SQLite and the reference model side by side: both do and keep the same, whatever is done."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Close, Command, Commit, Now, Plan, Sleep, Together, Undo, ask, run
from taptwice.errors import TaptwiceError
from taptwice.flows.transaction import (
    Asked,
    Claimed,
    Concluded,
    abandon,
    conclude,
    join,
    open_claim,
    settle,
    withdraw,
)
from taptwice.stores.sql import Commands, Entry, SqlStore
from tests.crash.worlds import Database, Effect, Memory, Sqlite, Tear

ACCOUNTS, KEYS = ("anna", "bert"), ("k1", "k2")
WINDOW = 100.0

accounts, keys = st.sampled_from(ACCOUNTS), st.sampled_from(KEYS)
requests = st.sampled_from([b"pay 5", b"pay 6"])
answers = st.builds(
    Answer,
    st.sampled_from([201, 204, 402]),
    st.sampled_from([(), (("location", "/charges/7"),)]),
    st.sampled_from([b"1", b"22", b"333"]),
)


class Untimed:
    """An executor that never waits: its clock is moved by its sleeping."""

    def __init__(self, inner: Any) -> None:
        self.dialect = inner.dialect
        self.handle_of = inner
        self._clock = 0.0

    def execute(self, command: Command[Any], /) -> Any:
        if isinstance(command, Now):
            return self._clock
        if isinstance(command, Sleep):
            self._clock += command.seconds
            return None
        return self.handle_of.execute(at_once(command))


def at_once(command: Command[Any]) -> Command[Any]:
    if isinstance(command, Together):
        return Together(tuple(map(at_once, command.commands)))
    return Begin() if isinstance(command, Begin) else command


@dataclass
class Open:
    """A claim whose work is under way, on both sides."""

    asked: Asked
    claimed: list[Claimed]
    executors: list[Untimed]
    attempt: int
    torn: bool = False


class Machine(RuleBasedStateMachine):
    stores: tuple[type[SqlStore], type[SqlStore]] = (SqlStore, SqlStore)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.sqlite = Sqlite(pathlib.Path(self.folder.name))
        self.sides: tuple[Database, Database] = (Memory(), self.sqlite)
        self.now = 1_000_000.0
        self.attempts = 0
        self.open: Open | None = None

    def teardown(self) -> None:
        if self.open is not None:
            for executor in self.open.executors:
                run(abandon(), executor.execute)
        self.sqlite.close()
        self.folder.cleanup()

    @initialize(now=st.integers(min_value=0, max_value=4_000_000_000))
    def begin(self, now: int) -> None:
        self.now = float(now)

    def both(
        self, plan: Callable[[SqlStore, int], Plan[Any]], executors: list[Untimed] | None = None
    ) -> list[Any]:
        """The outcomes of a plan on both sides, an exception as its type."""
        outcomes = []
        for side, database in enumerate(self.sides):
            store = self.stores[side](database.source.dialect, now=self.now)
            executor = executors[side] if executors else Untimed(database.working(joined=False).open())
            try:
                outcomes.append(run(plan(store, side), executor.execute))
            except TaptwiceError as error:
                outcomes.append(type(error))
        return outcomes

    def asked(self, account: str, key: str, request: bytes, savepoint: bool = True) -> Asked:
        return Asked(Keyed(account, key), fingerprint.of_bytes(request), WINDOW, 0, savepoint)

    # --- a claim that stays open for a while

    @precondition(lambda self: self.open is None)
    @rule(account=accounts, key=keys, request=requests, savepoint=st.booleans())
    def claim(self, account: str, key: str, request: bytes, savepoint: bool) -> None:
        asked = self.asked(account, key, request, savepoint)
        executors = [Untimed(database.working(joined=False).open()) for database in self.sides]
        model, real = self.both(lambda store, _: open_claim(store, asked), executors)
        assert type(model) is type(real)
        if isinstance(model, Claimed):
            self.attempts += 1
            self.open = Open(asked, [model, real], executors, self.attempts)
        else:
            assert model == real

    @precondition(lambda self: self.open is not None)
    @rule()
    def work(self) -> None:
        assert self.open
        effect = Effect(self.open.asked.keyed, self.open.attempt)
        assert self.both(lambda *_: ask(effect), self.open.executors) == [None, None]

    @precondition(lambda self: self.open is not None and self.open.asked.savepoint and not self.open.torn)
    @rule()
    def tear(self) -> None:
        assert self.open
        self.open.torn = True
        assert len(self.both(lambda *_: ask(Tear()), self.open.executors)) == 2

    @precondition(lambda self: self.open is not None)
    @rule(request=requests, savepoint=st.booleans())
    def rival(self, request: bytes, savepoint: bool) -> None:
        """Another attempt while the first runs. When its transaction was torn, its lock is gone too."""
        assert self.open
        if self.open.torn:
            return
        asked = self.asked(self.open.asked.keyed.account, self.open.asked.keyed.key, request, savepoint)
        model, real = self.both(lambda store, _: open_claim(store, asked))
        assert model == real
        assert isinstance(model, type)
        assert model.__name__ == "InFlight"

    @precondition(lambda self: self.open is not None)
    @rule(answer=answers, undo=st.booleans())
    def finish(self, answer: Answer, undo: bool) -> None:
        assert self.open
        now, self.open = self.open, None
        model, real = self.both(
            lambda store, side: conclude(store, now.asked, now.claimed[side], answer, undo), now.executors
        )
        assert model == real == Concluded(answer, torn=now.torn)

    @precondition(lambda self: self.open is not None)
    @rule()
    def abandon(self) -> None:
        assert self.open
        now, self.open = self.open, None
        one, other = self.both(lambda *_: abandon(), now.executors)
        assert one == other, "whether there was anything to roll back"

    # --- a claim in the caller's transaction, at one go

    @precondition(lambda self: self.open is None)
    @rule(
        account=accounts,
        key=keys,
        request=requests,
        answer=answers,
        raises=st.booleans(),
        commits=st.booleans(),
    )
    def joined(
        self, account: str, key: str, request: bytes, answer: Answer, raises: bool, commits: bool
    ) -> None:
        asked = self.asked(account, key, request)
        self.attempts += 1
        effect = Effect(asked.keyed, self.attempts)

        def plan(store: SqlStore, _: int) -> Plan[Any]:
            try:
                yield from ask(Begin())
                claimed = yield from join(store, asked)
                if isinstance(claimed, Claimed):
                    yield from ask(effect)
                    yield from withdraw() if raises else settle(store, asked, claimed, answer)
                if commits:
                    yield from ask(Commit())
                return "new" if isinstance(claimed, Claimed) else claimed.record
            finally:
                yield from abandon()

        executors = [Untimed(database.working(joined=True).open()) for database in self.sides]
        model, real = self.both(plan, executors)
        assert model == real

    # --- time

    @rule(seconds=st.sampled_from([1.0, 60.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.open is None)
    @rule(batch=st.integers(min_value=1, max_value=3))
    def sweep(self, batch: int) -> None:
        def plan(store: SqlStore, _: int) -> Plan[int]:
            yield from ask(Begin())
            swept = yield from store.sweep(batch)
            yield from ask(Commit())
            yield from ask(Close())
            return swept

        model, real = self.both(plan)
        assert model == real

    # --- what both hold

    @invariant()
    def same_records(self) -> None:
        def plan(store: SqlStore, _: int) -> Plan[Any]:
            found = []
            for account in ACCOUNTS:
                for key in KEYS:
                    found.append((yield from store.inspect(key, account)))
            return found

        executors = [Untimed(_reading(self.sides[0])), Untimed(_reading(self.sides[1]))]
        model, real = self.both(plan, executors)
        run(abandon(), executors[1].execute)
        assert model == real

    @invariant()
    def same_effects(self) -> None:
        for account in ACCOUNTS:
            for key in KEYS:
                model, real = (sorted(database.effects(Keyed(account, key))) for database in self.sides)
                assert model == real


def _reading(database: Database) -> Any:
    """An executor that looks from outside of every transaction."""
    if isinstance(database, Sqlite):
        from taptwice.drivers.sqlite import SqliteExecutor

        return SqliteExecutor(database.connect())
    return database.source.open()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)


# --- and it must be able to fail


class NeverUndone(SqlStore):
    def insert(self, entry: Entry, before: Commands = (), after: Commands = ()) -> Plan[bool]:
        return super().insert(entry, tuple(each for each in before if not isinstance(each, Undo)), after)


class SweepsTooMuch(SqlStore):
    def sweep(self, batch: int) -> Plan[int]:
        return super().sweep(batch + 1)


class ForgetsHeaders(SqlStore):
    def insert(self, entry: Entry, before: Commands = (), after: Commands = ()) -> Plan[bool]:
        bare = Answer(entry.answer.status, (), entry.answer.body)
        return super().insert(
            Entry(entry.keyed, entry.fingerprint, bare, entry.window, entry.begun), before, after
        )


@pytest.mark.parametrize("mutant", [NeverUndone, SweepsTooMuch, ForgetsHeaders])
def test_a_mutant_is_caught(mutant: type[SqlStore]) -> None:
    class Mutated(Machine):
        stores = (SqlStore, mutant)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Mutated,
            settings=settings(
                max_examples=400,
                stateful_step_count=50,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
