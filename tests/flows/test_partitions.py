"""Records partitioned by the day on which they expire: what `taptwice init --partition-by day` makes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine

from taptwice import drivers, sql
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Commit, Plan, arun, ask, run
from taptwice.drivers import asyncpg as asyncpg_driver
from taptwice.errors import ConstraintViolated, Contention, Misuse
from taptwice.flows.migrate import Migrated, migrate
from taptwice.flows.retention import partition_turn, sweep_turn, sweeping
from taptwice.flows.transaction import Asked, Claimed, Concluded, Replayed, abandon, conclude, open_claim
from taptwice.stores.sql import Entry, SqlStore

HOUR, DAY = 3600.0, 86400.0
STEP = sql.partitioning("postgresql", "day")
STEPS = (*sql.migrations("postgresql"), STEP)
ASKED = Asked(Keyed("acct_1", "k-1"), fingerprint.of_bytes(b"pay 5"), DAY, 0)

Connection = psycopg.Connection[tuple[Any, ...]]


def at(text: str) -> float:
    """A moment of UTC, in seconds since 1970."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def connecting(url: str, options: str = "") -> drivers.Source:
    return drivers.source(lambda: psycopg.connect(url, options=options))


@pytest.fixture
def source(fresh_postgres: str) -> drivers.Source:
    """A partitioned database."""
    made = connecting(fresh_postgres)
    run(migrate("postgresql", known=STEPS), made.open().execute)
    return made


@pytest.fixture
def reader(fresh_postgres: str, source: drivers.Source) -> Iterator[Connection]:
    with psycopg.connect(fresh_postgres, autocommit=True) as connection:
        yield connection


def saving(store: SqlStore, key: str, window: float = DAY) -> Plan[bool]:
    """A record without a claim, in a transaction of its own."""
    try:
        yield from ask(Begin())
        entry = Entry(Keyed("acct_1", key), fingerprint.of_bytes(b"x"), Answer(201), window, None)
        saved = yield from store.insert_late(entry)
        yield from ask(Commit())
        return saved
    finally:
        yield from abandon()


def remember(source: drivers.Source, key: str, moment: float, window: float = DAY) -> None:
    assert run(saving(SqlStore("postgresql", now=moment), key, window), source.open().execute)


def partitioned(source: drivers.Source, moment: float | None = None) -> list[tuple[str, str]]:
    """What a turn at that moment did: change, day."""
    changed = run(partition_turn(SqlStore("postgresql", now=moment)), source.open().execute)
    return [(each.change, each.name.removeprefix("taptwice_records_")) for each in changed]


def swept(source: drivers.Source, moment: float, batch: int = 100) -> int:
    return run(sweep_turn(SqlStore("postgresql", now=moment), batch), source.open().execute)


def places(reader: Connection) -> dict[str, str]:
    """Where each key's record is."""
    rows = reader.execute("SELECT key, tableoid::regclass::text FROM taptwice_records").fetchall()
    return {key: table.removeprefix("taptwice_records_") for key, table in rows}


def attempt(source: drivers.Source, moment: float, key: str = "k-1") -> Concluded | Replayed:
    """A whole request at that moment."""

    def serving() -> Plan[Concluded | Replayed]:
        store = SqlStore("postgresql", now=moment)
        asked = Asked(Keyed("acct_1", key), ASKED.fingerprint, DAY, 0)
        claimed = yield from open_claim(store, asked)
        if isinstance(claimed, Replayed):
            return claimed
        return (yield from conclude(store, asked, claimed, Answer(201), undo=False))

    return run(serving(), source.open().execute)


# --- the migration ------------------------------------------------------------------------------------------


def test_a_table_that_is_there_keeps_its_rows_its_owner_and_its_grants(fresh_postgres: str) -> None:
    source = connecting(fresh_postgres)
    run(migrate("postgresql"), source.open().execute)
    now = time.time()
    remember(source, "young", now)
    remember(source, "far", now, window=40 * DAY)
    remember(source, "old", now - 2 * DAY)
    role, other = (f"taptwice_test_{name}_{id(source)}" for name in ("owner", "service"))
    with psycopg.connect(fresh_postgres, autocommit=True) as reader:
        reader.execute(f"CREATE ROLE {role}; CREATE ROLE {other}".encode())
        try:
            reader.execute(f"ALTER TABLE taptwice_records OWNER TO {role}".encode())
            reader.execute(f"GRANT CREATE ON SCHEMA public TO {role}".encode())
            reader.execute(f"GRANT SELECT, INSERT ON taptwice_records TO {other}".encode())
            reader.execute(f"GRANT DELETE ON taptwice_records TO {other} WITH GRANT OPTION".encode())
            before = reader.execute("SELECT * FROM taptwice_records ORDER BY key").fetchall()

            assert run(migrate("postgresql", known=STEPS), source.open().execute) == Migrated(
                (STEP.name,), ()
            )
            assert run(migrate("postgresql", known=STEPS), source.open().execute) == Migrated((), ())
            assert run(migrate("postgresql"), source.open().execute) == Migrated((), ())

            assert reader.execute("SELECT * FROM taptwice_records ORDER BY key").fetchall() == before
            assert set(places(reader).values()) == {"default"}
            owners = reader.execute(
                "SELECT DISTINCT tableowner FROM pg_tables WHERE tablename LIKE 'taptwice\\_records%'"
            ).fetchall()
            assert owners == [(role,)]
            grants = reader.execute(
                "SELECT privilege_type, is_grantable FROM information_schema.role_table_grants"
                " WHERE table_name = 'taptwice_records' AND grantee = %s ORDER BY 1",
                (other,),
            ).fetchall()
            assert grants == [("DELETE", "YES"), ("INSERT", "NO"), ("SELECT", "NO")]

            # The rows go on answering, and leave by the batch.
            assert not run(saving(SqlStore("postgresql"), "young"), source.open().execute)
            assert [swept(source, now), swept(source, now)] == [1, 0]
            assert set(places(reader)) == {"young", "far"}
        finally:
            reader.execute(f"DROP OWNED BY {role}, {other} CASCADE; DROP ROLE {role}, {other}".encode())


def test_it_waits_for_no_transaction_for_long(fresh_postgres: str) -> None:
    source = connecting(fresh_postgres)
    run(migrate("postgresql"), source.open().execute)
    impatient = sql.Migration(STEP.name, STEP.text.replace("'5s'", "'50ms'"))
    assert impatient != STEP
    with psycopg.connect(fresh_postgres) as busy:
        busy.execute("SELECT 1 FROM taptwice_records")
        with pytest.raises(Contention, match="lock timeout"):
            run(migrate("postgresql", known=(*STEPS[:-1], impatient)), source.open().execute)
    assert run(migrate("postgresql", known=STEPS), source.open().execute).applied == (STEP.name,)


def test_the_table_is_looked_into_by_its_indexes(source: drivers.Source, reader: Connection) -> None:
    look = sql.statements("postgresql")["look"].compiled(lambda name, position: "%s")
    reader.execute("SET enable_seqscan = off")
    rows = reader.execute(f"EXPLAIN {look}".encode(), (ASKED.keyed.id,)).fetchall()
    plan = "\n".join(line for (line,) in rows)
    assert len(re.findall(r"Index Scan (?:using|on) taptwice_records_\w+_pkey", plan)) == 4
    assert "Seq Scan" not in plan


def test_only_postgresql_has_partitions() -> None:
    with pytest.raises(Misuse, match="PostgreSQL only"):
        sql.partitioning("sqlite", "day")


# --- days ---------------------------------------------------------------------------------------------------


def test_a_retry_across_midnight_replays(source: drivers.Source, reader: Connection) -> None:
    partitioned(source, at("2026-03-01T00:00"))
    assert isinstance(attempt(source, at("2026-03-01T23:59:59")), Concluded)
    assert isinstance(attempt(source, at("2026-03-02T00:00:01")), Replayed)
    assert isinstance(attempt(source, at("2026-03-02T00:00:01"), "k-2"), Concluded)
    assert places(reader) == {"k-1": "20260302", "k-2": "20260303"}


def test_a_day_is_dropped_when_its_end_has_passed(source: drivers.Source, reader: Connection) -> None:
    partitioned(source, at("2026-03-01T00:00"))
    attempt(source, at("2026-03-01T00:00:01"), "k-1")
    attempt(source, at("2026-03-01T23:00"), "k-2")
    attempt(source, at("2026-03-02T12:00"), "k-3")
    assert places(reader) == {"k-1": "20260302", "k-2": "20260302", "k-3": "20260303"}
    # k-1 is over, but its day is not: nothing is deleted there.
    for moment in ("2026-03-02T22:59", "2026-03-02T23:59:59"):
        assert swept(source, at(moment)) == 0
        assert not [day for change, day in partitioned(source, at(moment)) if day == "20260302"]
    assert isinstance(attempt(source, at("2026-03-02T22:59"), "k-2"), Replayed)

    assert ("dropped", "20260302") in partitioned(source, at("2026-03-03T00:00"))
    assert places(reader) == {"k-3": "20260303"}
    assert isinstance(attempt(source, at("2026-03-03T00:00"), "k-3"), Replayed)
    assert partitioned(source, at("2026-03-03T00:00")) == []


def test_default_is_deleted_from_and_the_other_partitions_are_not(
    source: drivers.Source, reader: Connection
) -> None:
    partitioned(source, at("2026-03-01T00:00"))
    for number in range(5):
        # The same places (ctid) in each of the two tables: DEFAULT, and a day that is not over.
        remember(source, f"nowhere-{number}", at("2026-02-20T00:00"))
        remember(source, f"day-{number}", at("2026-03-01T08:00"), window=HOUR)
    assert set(places(reader).values()) == {"default", "20260301"}
    now = at("2026-03-01T12:00")
    assert [swept(source, now, batch=2) for _ in range(4)] == [2, 2, 1, 0]
    assert places(reader) == {f"day-{number}": "20260301" for number in range(5)}


def test_the_coming_days_follow_the_longest_window(source: drivers.Source, reader: Connection) -> None:
    now = at("2026-03-01T12:00")
    assert partitioned(source, now) == [("created", day) for day in ("20260301", "20260302", "20260303")]
    # Nobody has told how long the windows are: the first records of a longer one go to DEFAULT.
    remember(source, "week-1", now, window=7 * DAY)
    remember(source, "year", now, window=365 * DAY)
    assert partitioned(source, now) == [
        ("created", day) for day in ("20260304", "20260305", "20260306", "20260307", "20260309")
    ]
    for day in range(1, 8):  # and those of the coming days do not, if a sweep comes once a day
        remember(source, f"week-{day + 1}", now + day * DAY - 12 * HOUR, window=7 * DAY)
        partitioned(source, now + day * DAY)
    found = places(reader)
    assert found.pop("week-1") == found.pop("year") == "default"
    assert found == {f"week-{day + 1}": f"202603{day + 8:02}" for day in range(1, 8)}


def test_a_late_sweep_leaves_in_default_what_is_there(source: drivers.Source, reader: Connection) -> None:
    partitioned(source, at("2026-03-01T00:00"))
    for number in range(3):
        remember(source, f"k-{number}", at("2026-03-05T23:00") + number * HOUR)
    assert set(places(reader).values()) == {"default"}
    changed = partitioned(source, at("2026-03-06T12:00"))
    assert changed == [
        *(("dropped", day) for day in ("20260301", "20260302", "20260303")),
        *(("created", day) for day in ("20260308",)),
    ]
    assert len(places(reader)) == 3
    assert swept(source, at("2026-03-07T00:30")) == 2  # by the minute, not by the day
    assert swept(source, at("2026-03-07T02:00")) == 1


def test_days_are_those_of_utc_wherever_the_session_is(fresh_postgres: str, source: drivers.Source) -> None:
    elsewhere = connecting(fresh_postgres, r"-c timezone=Pacific/Auckland -c datestyle=German")
    assert partitioned(elsewhere, at("2026-03-01T23:59")) == partitioned_like("20260301")
    assert partitioned(source, at("2026-03-01T23:59")) == []
    assert ("dropped", "20260301") in partitioned(elsewhere, at("2026-03-02T00:00"))


def partitioned_like(first: str) -> list[tuple[str, str]]:
    return [("created", str(int(first) + number)) for number in range(3)]


def test_partitions_of_another_make_are_known_by_their_bounds(
    source: drivers.Source, reader: Connection
) -> None:
    reader.execute(
        "CREATE TABLE january PARTITION OF taptwice_records"
        " FOR VALUES FROM ('2026-01-01 00:00+00') TO ('2026-02-01 00:00+00')"
    )
    assert partitioned(source, at("2026-01-30T12:00")) == [("created", "20260201")]
    assert ("dropped", "january") in partitioned(source, at("2026-02-01T00:00"))


# --- turns --------------------------------------------------------------------------------------------------


def test_turns_at_once_do_not_disturb_each_other(source: drivers.Source) -> None:
    barrier = threading.Barrier(4)
    done: list[list[tuple[str, str]]] = []

    def work() -> None:
        barrier.wait(30)
        try:
            done.append(partitioned(source, at("2026-03-01T00:00")))
        except Contention:  # a machine so slow that 1 s was not enough
            done.append([])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(change for each in done for change in each) == partitioned_like("20260301")


def test_a_turn_waits_for_no_transaction_for_long(fresh_postgres: str, source: drivers.Source) -> None:
    with psycopg.connect(fresh_postgres) as busy:
        busy.execute("SELECT 1 FROM taptwice_records")
        with pytest.raises(Contention, match="sweep again"):
            partitioned(source, at("2026-03-01T00:00"))
    assert partitioned(source, at("2026-03-01T00:00"))


def test_one_table_has_none(fresh_postgres: str) -> None:
    source = connecting(fresh_postgres)
    run(migrate("postgresql"), source.open().execute)
    assert partitioned(source) == []


def test_the_owner_alone_makes_and_drops(fresh_postgres: str, source: drivers.Source) -> None:
    role = f"taptwice_test_service_{id(source)}"
    with psycopg.connect(fresh_postgres, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role}".encode())
        try:
            admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON taptwice_records TO {role}".encode())
            service = connecting(fresh_postgres, f"-c role={role}")
            assert isinstance(attempt(service, time.time()), Concluded)
            for sweep in (swept, partitioned):
                with pytest.raises(Misuse, match=r"by its owner alone: sweep as the role \w+$"):
                    sweep(service, time.time())
        finally:
            admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_a_service_that_sweeps_drops_too(source: drivers.Source, reader: Connection) -> None:
    past = time.time() - 3 * DAY
    partitioned(source, past)
    remember(source, "dropped", past, window=HOUR)
    remember(source, "deleted", past - 5 * DAY, window=HOUR)
    remember(source, "alive", time.time())
    with sweeping(source, every=0.01):
        deadline = time.monotonic() + 10
        while len(places(reader)) > 1 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert set(places(reader)) == {"alive"}


# --- one record ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["claimed", "late"])
def test_a_save_waits_for_one_that_is_not_committed(
    fresh_postgres: str, source: drivers.Source, reader: Connection, first: str
) -> None:
    claimed, late = saves(fresh_postgres)
    assert outcomes(reader, *((claimed, late) if first == "claimed" else (late, claimed))) == [True, False]


def test_without_the_second_lock_it_does_not(
    fresh_postgres: str, source: drivers.Source, reader: Connection
) -> None:
    for text in STEP.statements:
        altered = re.sub(r"PERFORM pg_advisory_xact_lock\(uuid_hash_extended.*?;", "", text)
        if altered != text:
            reader.execute(altered.encode())
    assert outcomes(reader, *saves(fresh_postgres)) == [True, True]


Save = tuple[Connection, Callable[[], bool]]


def saves(url: str) -> tuple[Save, Save]:
    """One key, saved by the transaction that claimed it, and late; on either side of midnight."""
    claiming, other = psycopg.connect(url), psycopg.connect(url)
    entry = Entry(ASKED.keyed, ASKED.fingerprint, Answer(201), DAY, None)
    found = run(SqlStore("postgresql").claim(ASKED.keyed, 0), drivers.join(claiming).execute)
    claimed = Entry(ASKED.keyed, ASKED.fingerprint, Answer(201), DAY, found.begun)

    def save() -> bool:
        try:
            return run(SqlStore("postgresql").insert(claimed), drivers.join(claiming).execute)
        except ConstraintViolated:
            return False

    def save_late() -> bool:
        store = SqlStore("postgresql", now=time.time() + DAY)
        return run(store.insert_late(entry), drivers.join(other).execute)

    return (claiming, save), (other, save_late)


def outcomes(reader: Connection, first: Save, second: Save) -> list[bool]:
    """The first saves, the second saves before the first has committed, then both commit."""
    done = [first[1]()]
    thread = threading.Thread(target=lambda: done.append(second[1]()))
    thread.start()
    waiting = b"SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND pid = %s"
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        if reader.execute(waiting, (second[0].info.backend_pid,)).fetchone():
            break
        time.sleep(0.005)
    first[0].commit()
    thread.join()
    for connection, _ in (first, second):
        connection.commit()
        connection.close()
    count = reader.execute("SELECT count(*) FROM taptwice_records").fetchone()
    assert count == (sum(done),)
    return done


def test_an_answer_that_was_saved_late_replaces_that_of_a_second_attempt(source: drivers.Source) -> None:
    now = time.time()
    second = source.open()
    claimed = run(open_claim(SqlStore("postgresql"), ASKED), second.execute)
    assert isinstance(claimed, Claimed)
    late = Entry(ASKED.keyed, ASKED.fingerprint, Answer(201, (), b"first"), DAY, None)
    with_late = SqlStore("postgresql", now=now + DAY)  # in another partition

    def saving_late() -> Plan[None]:
        yield from ask(Begin())
        assert (yield from with_late.insert_late(late))
        yield from ask(Commit())
        yield from abandon()

    run(saving_late(), source.open().execute)
    concluded = run(
        conclude(SqlStore("postgresql"), ASKED, claimed, Answer(201, (), b"second"), undo=False),
        second.execute,
    )
    assert concluded == Concluded(Answer(201, (), b"first"), replayed=True)


# --- isolation ----------------------------------------------------------------------------------------------

LEVELS = ["read committed", "repeatable read", "serializable"]


def under(url: str, level: str) -> drivers.Source:
    """Connections whose transactions are of that isolation level."""
    return connecting(url, "-c default_transaction_isolation=" + level.replace(" ", r"\ "))


@pytest.fixture(params=["read committed", "serializable"])
def level(request: pytest.FixtureRequest, fresh_postgres: str) -> str:
    """The default of the session that has partitioned a table: from then on the level of all who claim."""
    run(migrate("postgresql", known=STEPS), under(fresh_postgres, request.param).open().execute)
    return str(request.param)


def test_one_isolation_level_works(fresh_postgres: str, level: str) -> None:
    good = under(fresh_postgres, level)
    assert isinstance(attempt(good, time.time()), Concluded)
    assert isinstance(attempt(good, time.time()), Replayed)
    assert not run(saving(SqlStore("postgresql"), "k-1"), good.open().execute)
    # Sweeping needs none.
    for other in LEVELS:
        assert partitioned(under(fresh_postgres, other), at("2026-03-01T00:00")) is not None
    assert partitioned(good, at("2026-03-01T00:00")) == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "sqlalchemy"])
@pytest.mark.parametrize("plan", ["claim", "late"])
async def test_others_are_refused(fresh_postgres: str, level: str, driver: str, plan: str) -> None:
    def doing() -> Plan[object]:
        store = SqlStore("postgresql")
        return open_claim(store, ASKED) if plan == "claim" else saving(store, "k-1")

    async def refused(isolation: str) -> None:
        if driver == "psycopg":
            run(doing(), under(fresh_postgres, isolation).open().execute)
        elif driver == "sqlalchemy":
            url = fresh_postgres.replace("://", "+psycopg://")
            engine = create_engine(url, isolation_level=isolation.upper())
            try:
                run(doing(), drivers.source(engine).open().execute)
            finally:
                engine.dispose()
        else:
            settings = {"default_transaction_isolation": isolation}

            async def connect() -> Any:
                return await asyncpg.connect(fresh_postgres, server_settings=settings)

            await arun(doing(), asyncpg_driver.connecting(connect).open().execute)

    for other in LEVELS:
        if other != level:
            told = (
                f"which is {other.upper()}, .* isolation level to {level.upper()}, as that of all who claim$"
            )
            with pytest.raises(Misuse, match=told):
                await refused(other)


def test_a_mixture_would_use_a_key_twice(
    fresh_postgres: str, source: drivers.Source, reader: Connection
) -> None:
    """Why there is one level: SERIALIZABLE is not told of what a READ COMMITTED transaction did."""
    for text in STEP.statements:
        altered = re.sub(
            r"IF current_setting\('transaction_isolation'\).*?END IF;", "", text, flags=re.DOTALL
        )
        if altered != text:
            reader.execute(altered.encode())
    with psycopg.connect(fresh_postgres) as strict:
        strict.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        strict.execute("SELECT 1")  # its snapshot
        assert isinstance(attempt(source, time.time()), Concluded)
        store, executor = SqlStore("postgresql"), drivers.join(strict)
        found = run(store.claim(ASKED.keyed, 0), executor.execute)
        assert found.record is None
        entry = Entry(ASKED.keyed, ASKED.fingerprint, Answer(201), DAY, found.begun)
        assert run(store.insert(entry), executor.execute)
    assert reader.execute("SELECT count(*) FROM taptwice_records").fetchone() == (2,)
