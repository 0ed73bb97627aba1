"""Every statement prepares on its server, the hot ones use their index, the migrations end in the schema."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

import psycopg
import pytest

from taptwice import sql
from taptwice.core.model import Keyed
from taptwice.core.plan import run
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.flows.migrate import migrate

ROWS = 5_000
ONE = Keyed("acct_1", "k-1").id

COLUMNS = [
    "id",
    "created_at",
    "expires_at",
    "fingerprint_version",
    "status",
    "fingerprint",
    "account",
    "key",
    "headers",
    "body",
]

Postgres = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def postgres(fresh_postgres: str) -> Iterator[Postgres]:
    source = psycopg_driver.connecting(lambda: psycopg.connect(fresh_postgres))
    run(migrate("postgresql"), source.open().execute)
    with psycopg.connect(fresh_postgres, autocommit=True) as connection:
        yield connection


@pytest.fixture
def sqlite(tmp_path: object) -> Iterator[sqlite3.Connection]:
    path = f"{tmp_path}/db"
    run(migrate("sqlite"), sqlite_driver.connecting(lambda: sqlite3.connect(path)).open().execute)
    connection = sqlite3.connect(path)
    yield connection
    connection.close()


# --- names --------------------------------------------------------------------------------------------------


def test_every_dialect_has_the_same_statements() -> None:
    # `lock` is a statement only where the right to write to the whole database is the lock; partitions are
    # PostgreSQL's alone.
    assert set(sql.statements("sqlite")) - set(sql.statements("postgresql")) == {"lock"}
    assert set(sql.statements("postgresql")) - set(sql.statements("sqlite")) == {"partitions"}


@pytest.mark.parametrize("name", sorted(set(sql.statements("postgresql")) & set(sql.statements("sqlite"))))
def test_a_statement_takes_the_same_parameters_in_every_dialect(name: str) -> None:
    one, other = (sql.statements(dialect)[name].parameters for dialect in ("postgresql", "sqlite"))
    # SQLite knows by `lock` that the claim is its own, and by its savepoint that the transaction is the same.
    spared = {"lock", "wait_ms"} if name == "claim" else set()
    assert set(one) - spared == set(other)


# --- prepare ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(sql.statements("postgresql")))
def test_postgresql_prepares(postgres: Postgres, name: str) -> None:
    statement = sql.statements("postgresql")[name]
    text = statement.compiled(lambda parameter, position: f"${position}")
    postgres.execute(f"PREPARE it AS {text}".encode())
    found = postgres.execute("SELECT parameter_types::text[] FROM pg_prepared_statements").fetchone()
    assert found is not None
    types = found[0]
    assert isinstance(types, list)
    # Each parameter is cast: what a driver guesses from a null or a small number never matters.
    assert len(types) == len(statement.parameters)


@pytest.mark.parametrize("name", sorted(sql.statements("sqlite")))
def test_sqlite_prepares(sqlite: sqlite3.Connection, name: str) -> None:
    statement = sql.statements("sqlite")[name]
    text = statement.compiled(lambda parameter, position: f":{parameter}")
    assert sqlite.execute(f"EXPLAIN {text}", dict.fromkeys(statement.parameters)).fetchall()


# --- plans of the servers -----------------------------------------------------------------------------------


def filled(postgres: Postgres) -> None:
    postgres.execute(
        "INSERT INTO taptwice_records SELECT md5(n::text)::uuid, now(), now() + n * interval '1 s', 1, 201,"
        " '', 'a', n::text, '' FROM generate_series(1, %s) AS n",
        (ROWS,),
    )
    postgres.execute("ANALYZE taptwice_records")


def explained(postgres: Postgres, name: str, **values: str) -> str:
    statement = sql.statements("postgresql")[name]
    text = statement.compiled(lambda parameter, position: f"${position}")
    return explained_text(postgres, text, *(values[each] for each in statement.parameters))


def explained_text(postgres: Postgres, text: str, *arguments: str) -> str:
    postgres.execute(f"PREPARE it AS {text}".encode())
    rows = postgres.execute(f"EXPLAIN EXECUTE it({', '.join(arguments)})".encode()).fetchall()
    return "\n".join(str(line) for (line,) in rows)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", ["look", "inspect"])
def test_postgresql_finds_a_record_by_its_primary_key(postgres: Postgres, name: str, mode: str) -> None:
    filled(postgres)
    postgres.execute("SELECT set_config('plan_cache_mode', %s, false)", (mode,))
    plan = explained(postgres, name, id=rf"'\x{ONE.hex()}'")
    assert "Index Scan using taptwice_records_pkey" in plan
    assert "Seq Scan" not in plan


def test_postgresql_claims_by_the_primary_key(postgres: Postgres) -> None:
    filled(postgres)
    claim = sql.statements("postgresql")["claim"].compiled(lambda name, position: f"%({name})s")
    # The look-up stands in a function, where EXPLAIN does not look: what was read is counted instead.
    with postgres.transaction():
        for number in range(20):
            values = {"lock": number, "id": Keyed("acct_1", str(number)).id, "wait_ms": 0}
            postgres.execute(claim.encode(), values)
        counts = postgres.execute(
            "SELECT pg_stat_get_xact_numscans('taptwice_records'::regclass),"
            " pg_stat_get_xact_numscans('taptwice_records_pkey'::regclass)"
        ).fetchone()
    assert counts == (0, 20)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_an_index_can_serve_the_sweep_of_postgresql(postgres: Postgres, mode: str) -> None:
    filled(postgres)
    # A small table is read whole, and rightly. Forbidding that shows whether the index could be used at all.
    postgres.execute("SET enable_seqscan = off")
    postgres.execute("SELECT set_config('plan_cache_mode', %s, false)", (mode,))
    # EXPLAIN does not look into a function: its one statement is explained by itself.
    source = postgres.execute("SELECT prosrc FROM pg_proc WHERE proname = 'taptwice_sweep'").fetchone()
    assert source is not None
    deleting = re.search(r"DELETE.*(?=;\s*END)", str(source[0]), re.DOTALL)
    assert deleting is not None
    text = deleting[0].replace("moment", "CAST($1 AS timestamptz)").replace("batch", "CAST($2 AS integer)")
    plan = explained_text(postgres, text, "now()", "100")
    assert "Bitmap Index Scan on taptwice_records_expires_at" in plan
    assert "Seq Scan" not in plan
    assert "Tid Scan" in plan  # the rows that were found are not searched for again


def query_plan(connection: sqlite3.Connection, name: str) -> list[str]:
    statement = sql.statements("sqlite")[name]
    text = statement.compiled(lambda parameter, position: f":{parameter}")
    rows = connection.execute(f"EXPLAIN QUERY PLAN {text}", dict.fromkeys(statement.parameters))
    return [row[3] for row in rows]


@pytest.mark.parametrize("name", ["claim", "look", "inspect"])
def test_sqlite_finds_a_record_by_its_primary_key(sqlite: sqlite3.Connection, name: str) -> None:
    plan = [step for step in query_plan(sqlite, name) if "taptwice_records" in step]
    assert len(plan) == 1
    assert re.match(
        r"SEARCH taptwice_records USING INDEX sqlite_autoindex_taptwice_records_1 \(id=\?\)", plan[0]
    )


def test_sqlite_sweeps_without_reading_the_whole_table(sqlite: sqlite3.Connection) -> None:
    plan = query_plan(sqlite, "sweep")
    assert not [step for step in plan if step.startswith("SCAN")]
    assert [step for step in plan if "COVERING INDEX taptwice_records_expires_at (expires_at<?)" in step]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_an_index_can_serve_the_list_of_open_intents_of_postgresql(postgres: Postgres, mode: str) -> None:
    postgres.execute("SET enable_seqscan = off")
    postgres.execute("SET enable_sort = off")
    postgres.execute("SELECT set_config('plan_cache_mode', %s, false)", (mode,))
    assert "Index Scan using taptwice_intents_open" in explained(
        postgres, "intents_open", now="NULL", batch="9"
    )


def test_sqlite_lists_open_intents_by_their_index(sqlite: sqlite3.Connection) -> None:
    assert query_plan(sqlite, "intents_open") == ["SCAN taptwice_intents USING INDEX taptwice_intents_open"]


@pytest.mark.parametrize("name", ["intent_look", "intent_settle", "intent_drop", "intent_renew"])
def test_sqlite_finds_an_intent_by_its_primary_key(sqlite: sqlite3.Connection, name: str) -> None:
    [step] = query_plan(sqlite, name)
    assert "USING INDEX sqlite_autoindex_taptwice_intents_1 (name=?)" in step


# --- migrations ---------------------------------------------------------------------------------------------


def test_the_migrations_end_in_the_schema_of_postgresql(postgres: Postgres) -> None:
    def rows(statement: str) -> list[tuple[object, ...]]:
        return postgres.execute(statement.encode()).fetchall()

    columns = rows(
        "SELECT column_name, udt_name, is_nullable FROM information_schema.columns"
        " WHERE table_name = 'taptwice_records' ORDER BY ordinal_position"
    )
    types = ["uuid", "timestamptz", "timestamptz", "int2", "int2", "bytea", "text", "text", "bytea", "bytea"]
    nullable = ["NO"] * 9 + ["YES"]
    assert columns == list(zip(COLUMNS, types, nullable, strict=True))
    assert rows("SELECT indexname FROM pg_indexes WHERE tablename = 'taptwice_records' ORDER BY 1") == [
        ("taptwice_records_expires_at",),
        ("taptwice_records_pkey",),
    ]
    functions = rows("SELECT proname FROM pg_proc WHERE proname LIKE 'taptwice%' ORDER BY 1")
    assert functions == [
        ("taptwice_claim",),
        ("taptwice_partitions",),
        ("taptwice_save",),
        ("taptwice_save_late",),
        ("taptwice_sweep",),
    ]
    assert rows("SELECT name FROM taptwice_migrations ORDER BY 1") == names("postgresql")


def test_the_migrations_end_in_the_schema_of_sqlite(sqlite: sqlite3.Connection) -> None:
    columns = sqlite.execute(
        "SELECT name, type, \"notnull\" FROM pragma_table_info('taptwice_records')"
    ).fetchall()
    types = ["BLOB", "REAL", "REAL", "INTEGER", "INTEGER", "BLOB", "TEXT", "TEXT", "BLOB", "BLOB"]
    assert columns == list(zip(COLUMNS, types, [1] * 9 + [0], strict=True))
    indexes = sqlite.execute("SELECT name FROM pragma_index_list('taptwice_records') ORDER BY 1").fetchall()
    assert indexes == [("sqlite_autoindex_taptwice_records_1",), ("taptwice_records_expires_at",)]
    assert sqlite.execute("SELECT name FROM taptwice_migrations ORDER BY 1").fetchall() == names("sqlite")


def names(dialect: sql.Dialect) -> list[tuple[object, ...]]:
    return [(each.name,) for each in sql.migrations(dialect)]


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_migrations_are_numbered_in_a_row_and_name_their_phase(dialect: sql.Dialect) -> None:
    for number, step in enumerate(sql.migrations(dialect), start=1):
        assert re.fullmatch(rf"{number:03}_(pre|post)_[a-z_]+", step.name)
        assert step.phase == step.name.split("_")[1]


def test_a_migration_is_cut_into_statements_and_loses_no_word() -> None:
    for dialect in ("postgresql", "sqlite"):
        for step in sql.migrations(dialect):
            bare = re.sub(r"--.*", "", step.text)
            assert "".join("; ".join(step.statements).split()) == "".join(bare.split()).removesuffix(";")
            assert all(text.startswith(("CREATE ", "ALTER ", "DROP ")) for text in step.statements)
