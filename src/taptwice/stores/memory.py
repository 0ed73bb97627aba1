"""The reference model: a database in memory, for tests alone. What a store must do, in the fewest words.

    database = MemoryDatabase()                 is a source of executors, as a pool is
    executor = database.open()                  carries commands out; `executor.handle` is the user's end
    executor.handle.insert("charges", 100)      an effect, in the transaction of the claim
    database.rows("charges")                    what was committed

It answers the statements of PostgreSQL by their names, under READ COMMITTED: what is not committed is
seen by nobody else, a lock ends with its transaction, an error costs the transaction, and an insert
waits for the end of another transaction that has inserted the same key.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from taptwice.core import plan
from taptwice.core.plan import Command, Row, Rows
from taptwice.errors import Busy, ConstraintViolated, Misuse, Torn
from taptwice.sql import Dialect

Reply = TypeVar("Reply")
Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A row of the table of records."""

    id: bytes
    created_at: float
    expires_at: float
    account: str | None
    key: str | None
    content: Row
    """Fingerprint's version and digest, status, headers, body."""

    def inspected(self) -> Row:
        return (self.id.hex(), self.account, self.key, *self.content, self.created_at, self.expires_at)


@dataclass(eq=False, slots=True)
class _Transaction:
    begun: float
    rows: list[tuple[str, Any]] = field(default_factory=list)
    records: list[Stored] = field(default_factory=list)
    forgotten: list[Stored] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    failed: bool = False


class MemoryDatabase:
    """All that is committed, who holds which lock, and the transactions that are open.

    `lock_timeout`: seconds that an insert waits for another transaction; None waits until it ends.
    `partitioned`: the primary key is (id, created_at), as over partitions by time, and no second lock stands
    in for it: no backstop any more.
    """

    dialect: Dialect = "postgresql"
    blocking = True

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        lock_timeout: float | None = None,
        partitioned: bool = False,
    ) -> None:
        self.now, self.lock_timeout, self.partitioned = now, lock_timeout, partitioned
        self.changed = threading.Condition()
        self.records: list[Stored] = []
        self.committed: list[tuple[str, Any]] = []
        self.locks: dict[int, _Transaction] = {}
        self.transactions: list[_Transaction] = []
        self._last = 0.0

    def open(self) -> MemoryExecutor:
        return MemoryExecutor(self)

    def asynchronous(self) -> AsyncMemorySource:
        """The same database for awaiting code."""
        return AsyncMemorySource(self)

    def rows(self, table: str) -> tuple[Any, ...]:
        """The committed rows of a table of the user's."""
        with self.changed:
            return tuple(row for name, row in self.committed if name == table)

    def begin(self) -> _Transaction:
        self._last = max(self.now(), self._last + 1e-6)  # a transaction is known by its beginning
        self.transactions.append(_Transaction(self._last))
        return self.transactions[-1]

    def end(self, transaction: _Transaction, commit: bool) -> None:
        if commit and not transaction.failed:
            self.records = [each for each in self.records if each not in transaction.forgotten]
            self.records += transaction.records
            self.committed += transaction.rows
        self.transactions.remove(transaction)
        self.locks = {lock: holder for lock, holder in self.locks.items() if holder is not transaction}
        self.changed.notify_all()

    def unique(self, record: Stored) -> object:
        return (record.id, record.created_at) if self.partitioned else record.id


class MemoryHandle:
    """What the user's code works on."""

    def __init__(self, executor: MemoryExecutor) -> None:
        self._executor = executor

    def insert(self, table: str, row: Any) -> None:
        with self._executor.statement() as transaction:
            transaction.rows.append((table, row))

    def begin(self) -> None:
        self._executor.execute(plan.Begin())

    def commit(self) -> None:
        """What a handler must not do inside a claim: end the transaction."""
        self._executor.execute(plan.Commit())

    def rollback(self) -> None:
        _ = self._executor.execute(plan.Rollback())


class MemoryExecutor:
    """Commands on one connection, one method a command, one method a statement."""

    dialect: Dialect = "postgresql"
    holds_back = False

    def __init__(self, database: MemoryDatabase) -> None:
        self.database = database
        self._transaction: _Transaction | None = None
        self._handle: MemoryHandle | None = None

    @property
    def handle(self) -> MemoryHandle:
        if self._handle is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._handle

    def give_up(self) -> None:
        """Nothing here is waited for in line."""

    def execute(self, command: Command[Reply], /) -> Reply:
        together = isinstance(command, plan.Together)  # between its commands others may come
        with nullcontext() if together else self.database.changed:
            reply: Reply = getattr(self, f"_{type(command).__name__.lower()}")(command)
        return reply

    @contextmanager
    def statement(self) -> Iterator[_Transaction]:
        """The open transaction; without one, a statement is a transaction of its own."""
        with self.database.changed:
            transaction = self._transaction or self.database.begin()
            if transaction.failed:
                raise Misuse("a database error inside the claim was swallowed; this transaction is lost")
            try:
                yield transaction
            except Busy:
                raise  # unlike in PostgreSQL: so that whoever schedules by hand may try again
            except Exception:
                transaction.failed = True
                raise
            finally:
                if transaction is not self._transaction:
                    self.database.end(transaction, commit=True)

    def _together(self, command: plan.Together) -> tuple[Any, ...]:
        return tuple(self.execute(each) for each in command.commands)

    def _now(self, command: plan.Now) -> float:
        return time.monotonic()

    def _sleep(self, command: plan.Sleep) -> None:
        _ = self.database.changed.wait(command.seconds)

    def _begin(self, command: plan.Begin) -> None:
        if self._transaction is not None:
            raise Misuse("a transaction is open already")
        self._handle = self._handle or MemoryHandle(self)
        self._transaction = self.database.begin()

    def _join(self, command: plan.Join) -> None:
        if self._transaction is None:
            raise Misuse("a claim joins a transaction, and none is open")

    def _savepoint(self, command: plan.Savepoint) -> None:
        with self.statement() as transaction:
            transaction.marks.append((len(transaction.rows), len(transaction.records)))

    def _flush(self, command: plan.Flush) -> None:
        pass

    def _undo(self, command: plan.Undo) -> None:
        if self._transaction is None or not self._transaction.marks:
            raise Torn
        rows, records = self._transaction.marks.pop()
        del self._transaction.rows[rows:], self._transaction.records[records:]
        self._transaction.failed = False

    def _release(self, command: plan.Release) -> None:
        if self._transaction is None or not self._transaction.marks:
            raise Torn
        with self.statement() as transaction:
            _ = transaction.marks.pop()

    def _commit(self, command: plan.Commit) -> None:
        if self._transaction is None:
            raise Torn
        transaction, self._transaction = self._transaction, None
        self.database.end(transaction, commit=True)

    def _rollback(self, command: plan.Rollback) -> bool:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            self.database.end(transaction, commit=False)
        return transaction is not None

    def _close(self, command: plan.Close) -> None:
        _ = self._rollback(plan.Rollback())
        self._handle = None

    def _query(self, command: plan.Query) -> Rows:
        with self.statement() as transaction:
            rows: Rows = getattr(self, f"_q_{command.statement}")(transaction, dict(command.parameters))
            return rows

    def _seen(self, transaction: _Transaction) -> list[Stored]:
        everything = (*self.database.records, *transaction.records)
        return [record for record in everything if record not in transaction.forgotten]

    def _q_claim(self, transaction: _Transaction, given: Parameters) -> Rows:
        lock, wait, none = given["lock"], (given["wait_ms"] or 0) / 1000, (None,) * 6

        def free() -> bool:
            return self.database.locks.get(lock, transaction) is transaction

        if locked := self.database.changed.wait_for(free, wait):
            self.database.locks[lock] = transaction
        found = self._q_look(transaction, given) if locked else ()
        return ((locked, transaction.begun, False, *(found[0] if found else none)),)

    def _q_insert(self, transaction: _Transaction, given: Parameters) -> Rows:
        if given["begun"] != transaction.begun:
            return ()
        if not self._q_insert_late(transaction, given):
            raise ConstraintViolated("duplicate key value violates unique constraint taptwice_records_pkey")
        return ((1,),)

    def _q_insert_late(self, transaction: _Transaction, given: Parameters) -> Rows:
        moment = transaction.begun if given["now"] is None else given["now"]
        content = tuple(given[name] for name in ("version", "fingerprint", "status", "headers", "body"))
        expires_at = moment + given["window"]
        record = Stored(given["id"], moment, expires_at, given["account"], given["key"], content)
        database, key = self.database, self.database.unique(record)

        def alone() -> bool:
            others = (each for each in database.transactions if each is not transaction)
            return all(database.unique(theirs) != key for each in others for theirs in each.records)

        if not database.changed.wait_for(alone, database.lock_timeout):
            raise Busy("another transaction has inserted this key and has not ended")
        if any(database.unique(each) == key for each in self._seen(transaction)):
            return ()
        transaction.records.append(record)
        return ((1,),)

    def _q_look(self, transaction: _Transaction, given: Parameters) -> Rows:
        return tuple(
            (*each.content, each.created_at) for each in self._seen(transaction) if each.id == given["id"]
        )

    def _q_inspect(self, transaction: _Transaction, given: Parameters) -> Rows:
        return tuple(each.inspected() for each in self._seen(transaction) if each.id == given["id"])

    def _q_search(self, transaction: _Transaction, given: Parameters) -> Rows:
        return tuple(each.inspected() for each in self._seen(transaction) if each.key == given["key"])

    def _q_sweep(self, transaction: _Transaction, given: Parameters) -> Rows:
        now = self.database.now() if given["now"] is None else given["now"]
        taken = [record for each in self.database.transactions for record in each.forgotten]
        old = [each for each in self.database.records if each.expires_at < now and each not in taken]
        transaction.forgotten += old[: given["batch"]]
        return ((1,),) * len(old[: given["batch"]])

    def _q_partitions(self, transaction: _Transaction, given: Parameters) -> Rows:
        return ()


class AsyncMemoryExecutor:
    """The same, awaiting: it waits by asking again, so that the loop is never blocked."""

    dialect: Dialect = "postgresql"
    holds_back = False

    def __init__(self, inner: MemoryExecutor) -> None:
        self._inner = inner

    @property
    def handle(self) -> MemoryHandle:
        return self._inner.handle

    async def execute(self, command: Command[Reply], /) -> Reply:
        reply: Any
        if isinstance(command, plan.Together):
            reply = tuple([await self.execute(each) for each in command.commands])
        elif isinstance(command, plan.Sleep):
            reply = None
            await asyncio.sleep(command.seconds)
        elif isinstance(command, plan.Query) and command.statement == "claim":
            given = dict(command.parameters)
            at_once = plan.Query("claim", (*given.items(), ("wait_ms", 0)))
            end = time.monotonic() + float(given.get("wait_ms") or 0) / 1000
            # Whoever holds the lock may be of another loop or thread.
            while not (reply := self._inner.execute(at_once))[0][0] and time.monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        else:
            reply = self._inner.execute(command)
        result: Reply = reply
        return result


class AsyncMemorySource:
    """Where awaiting executors come from."""

    dialect: Dialect = "postgresql"
    blocking = False

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    def open(self) -> AsyncMemoryExecutor:
        return AsyncMemoryExecutor(self._database.open())
