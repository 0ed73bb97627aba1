"""Eight workers on each of 400 keys, on a real PostgreSQL, over partitions and in one table.

Partitioned by day, with rows going to either side of midnight, the primary key cannot see a duplicate: what
keeps keys from being doubled there is that the look-up's snapshot is younger than the lock.
"""

from __future__ import annotations

import random
import threading

import psycopg
import pytest
from psycopg import IsolationLevel

from taptwice import drivers, sql
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Query, Together, run
from taptwice.errors import Contention
from taptwice.flows.transaction import Asked, Replayed, join, settle
from taptwice.stores.sql import SqlStore

WORKERS, KEYS = 8, 400
MIDNIGHT = 1_767_225_600.0  # 2026-01-01, UTC

PARTITIONED = """
    CREATE TABLE taptwice_records (LIKE whole INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (id, created_at))
        PARTITION BY RANGE (created_at);
    CREATE TABLE evening PARTITION OF taptwice_records
        FOR VALUES FROM ('2025-12-31 00:00+00') TO ('2026-01-01 00:00+00');
    CREATE TABLE morning PARTITION OF taptwice_records
        FOR VALUES FROM ('2026-01-01 00:00+00') TO ('2026-01-02 00:00+00');
"""


class LockAndLookInOne(SqlStore):
    """Mutant: one statement, whose snapshot is older than the lock that it waits for."""

    text = """
        SELECT r.fingerprint_version, r.fingerprint, r.status, r.headers, r.body,
               CAST(extract(epoch FROM r.created_at) AS float8), CAST(extract(epoch FROM now()) AS float8)
          FROM (SELECT {lock}) AS locked LEFT JOIN taptwice_records r ON r.id = encode(%s, 'hex')::uuid
    """


class NoLock(LockAndLookInOne):
    """Mutant: look, then insert."""


MUTANTS: dict[type[SqlStore], str] = {
    LockAndLookInOne: "pg_advisory_xact_lock(%s)",
    NoLock: "CAST(%s AS bigint)",
}


class Raw:
    """An executor that carries out the mutants' claim; the rest is psycopg's."""

    def __init__(self, connection: psycopg.Connection, store: type[SqlStore]) -> None:
        self._inner = drivers.join(connection)
        self._connection = connection
        self._lock = MUTANTS[store]
        self.dialect: sql.Dialect = "postgresql"

    def execute(self, command: object, /) -> object:
        if isinstance(command, Together) and any(_is_claim(each) for each in command.commands):
            return tuple(self.execute(each) for each in command.commands)
        if not isinstance(command, Query) or not _is_claim(command):
            return self._inner.execute(command)
        given = dict(command.parameters)
        text = LockAndLookInOne.text.format(lock=self._lock)
        row = self._connection.execute(text.encode(), (given["lock"], given["id"])).fetchone()
        assert row is not None
        *record, begun = row
        return ((True, begun, False, *record),)


def _is_claim(command: object) -> bool:
    return isinstance(command, Query) and command.statement == "claim"


class Stress:
    """The table, the workers, and the count of keys that were charged more than once."""

    def __init__(self, url: str, partitioned: bool) -> None:
        self.url = url
        with psycopg.connect(url, autocommit=True) as connection:
            migration = sql.migrations("postgresql")[0]
            connection.execute(migration.text.encode())
            connection.execute("CREATE TABLE charges (key text NOT NULL)")
            if partitioned:
                connection.execute("ALTER TABLE taptwice_records RENAME TO whole")
                connection.execute(PARTITIONED)

    def run(
        self,
        keys: int = KEYS,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
        store: type[SqlStore] = SqlStore,
    ) -> int:
        """How many of the keys were doubled. Every key must have been charged."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("TRUNCATE charges, taptwice_records")
        together = threading.Barrier(WORKERS)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                with psycopg.connect(self.url) as connection:
                    connection.isolation_level = isolation
                    chance = random.Random(seed)
                    for number in range(keys):
                        together.wait(60)
                        self._request(connection, f"key-{number}", chance, store)
            except BaseException as error:
                failures.append(error)
                together.abort()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        with psycopg.connect(self.url) as connection:
            counts = connection.execute("SELECT count(*) FROM charges GROUP BY key").fetchall()
        assert len(counts) == keys, "every key is charged in the end"
        return sum(count > 1 for (count,) in counts)

    def _request(
        self, connection: psycopg.Connection, key: str, chance: random.Random, kind: type[SqlStore]
    ) -> None:
        """One request, run again as long as it is told to; 10 % are rolled back once, then tried again."""
        gives_up = chance.random() < 0.1
        asked = Asked(Keyed("anna", key), fingerprint.of_bytes(b"pay 5"), 3600, 30)
        while True:
            store = kind("postgresql", now=MIDNIGHT + chance.uniform(-3600, 3600))
            execute = (Raw(connection, kind) if kind in MUTANTS else drivers.join(connection)).execute
            try:
                claimed = run(join(store, asked), execute)
                if isinstance(claimed, Replayed):
                    connection.commit()
                    return
                connection.execute("INSERT INTO charges VALUES (%s)", (key,))
                if gives_up:
                    gives_up = False
                    connection.rollback()
                    continue
                run(settle(store, asked, claimed, Answer(201)), execute)
                connection.commit()
                return
            except (Contention, psycopg.errors.SerializationFailure):
                connection.rollback()


def test_lock_then_look_doubles_nothing_over_partitions(fresh_postgres: str) -> None:
    doubled = Stress(fresh_postgres, partitioned=True).run()
    print("doubled:", f"{doubled} of {KEYS}")
    assert doubled == 0


def test_both_partitions_were_used(fresh_postgres: str) -> None:
    stress = Stress(fresh_postgres, partitioned=True)
    assert stress.run(keys=50) == 0
    with psycopg.connect(fresh_postgres) as connection:
        for partition in (b"evening", b"morning"):
            assert connection.execute(b"SELECT 1 FROM " + partition + b" LIMIT 1").fetchone()


def test_serializable_doubles_nothing_over_partitions(fresh_postgres: str) -> None:
    doubled = Stress(fresh_postgres, partitioned=True).run(100, IsolationLevel.SERIALIZABLE)
    print("doubled:", f"{doubled} of 100")
    assert doubled == 0


@pytest.mark.parametrize(
    "isolation",
    [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE],
    ids=lambda level: level.name,
)
def test_one_table_doubles_nothing(fresh_postgres: str, isolation: IsolationLevel) -> None:
    """Where a snapshot can be older than the lock, the primary key is the backstop."""
    doubled = Stress(fresh_postgres, partitioned=False).run(200, isolation)
    print("doubled:", f"{doubled} of 200")
    assert doubled == 0


@pytest.mark.parametrize("mutant", [LockAndLookInOne, NoLock])
def test_a_mutant_doubles_keys_over_partitions(fresh_postgres: str, mutant: type[SqlStore]) -> None:
    doubled, keys = _until_doubled(Stress(fresh_postgres, partitioned=True), store=mutant)
    print("doubled:", f"{doubled} of {keys}")
    assert doubled


def test_repeatable_read_doubles_keys_over_partitions(fresh_postgres: str) -> None:
    """Why this pair is refused: the snapshot of the whole transaction is older than the lock."""
    stress = Stress(fresh_postgres, partitioned=True)
    doubled, keys = _until_doubled(stress, isolation=IsolationLevel.REPEATABLE_READ)
    print("doubled:", f"{doubled} of {keys}")
    assert doubled


@pytest.mark.parametrize("mutant", [LockAndLookInOne, NoLock])
def test_one_table_withstands_the_mutants(fresh_postgres: str, mutant: type[SqlStore]) -> None:
    doubled = Stress(fresh_postgres, partitioned=False).run(100, store=mutant)
    print("doubled:", f"{doubled} of 100")
    assert doubled == 0


def _until_doubled(
    stress: Stress,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    store: type[SqlStore] = SqlStore,
) -> tuple[int, int]:
    """Rounds until a doubled key is seen, at most ten; the doubled keys and all keys."""
    for rounds in range(1, 11):
        if doubled := stress.run(50, isolation, store):
            return doubled, 50 * rounds
    return 0, 500
