"""The command line, on a real SQLite file and a real PostgreSQL, through psycopg and through asyncpg."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from click.testing import CliRunner, Result

from taptwice import cli, cli_database, drivers, sql
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import run
from taptwice.stores.sql import Entry, SqlStore

DAY = 86400.0
MIGRATIONS = [each.name for each in sql.migrations("postgresql")]
SECRET = "s3cr-et/%"
IN_URL = "s3cr-et%2F%25"


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"TAPTWICE_DATABASE_URL": None, **environment})


def succeed(*arguments: str, **environment: str) -> Result:
    result = invoke(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result


def fail(code: int, *arguments: str, **environment: str) -> str:
    """The one line that it says."""
    result = invoke(*arguments, **environment)
    assert result.exit_code == code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)  # and no traceback
    assert result.stdout == ""
    lines = [
        line
        for line in result.stderr.splitlines()
        if not line.startswith(("Usage:", "Try '", "no --account"))
    ]
    assert len([line for line in lines if line]) == 1, result.stderr
    return result.stderr


def connected(url: str) -> Any:
    if url.startswith("sqlite"):
        return closing(sqlite3.connect(url.removeprefix("sqlite:///")))
    return psycopg.connect(url)


def remember(
    url: str, key: str, *, account: str = "acct_1", made: float = 0, in_clear: bool = True, **answer: Any
) -> None:
    """A record of that key that was made so many seconds ago, with a window of a day."""
    with connected(url) as connection:
        executor = drivers.join(connection)
        store = SqlStore(executor.dialect, in_clear, now=time.time() - made)
        given = Answer(
            **{"status": 201, "headers": (("content-type", "text/plain"),), "body": b"paid", **answer}
        )
        assert run(
            store.insert_late(Entry(Keyed(account, key), fingerprint.of_bytes(b"x"), given, DAY, None)),
            executor.execute,
        )
        connection.commit()


def count(url: str) -> int:
    with connected(url) as connection:
        [(found,)] = connection.execute("SELECT count(*) FROM taptwice_records").fetchall()
    return int(found)


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg"])
def empty(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/shop.db"
        return
    url: str = request.getfixturevalue("fresh_postgres")
    if request.param == "asyncpg":
        without(monkeypatch, "psycopg")
    yield url


@pytest.fixture
def database(empty: str) -> str:
    """The URL of a database with our tables."""
    succeed("init", "--database", empty)
    return empty


@pytest.fixture
def lite(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/shop.db"
    succeed("init", "--database", url)
    return url


def without(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """As if these were not installed."""

    def missing(url: str) -> Any:
        raise ImportError

    for library in libraries:
        monkeypatch.setattr(cli_database, f"_through_{library}", missing)


# --- init ---------------------------------------------------------------------------------------------------


def test_init_says_what_it_did_and_does_it_once(empty: str) -> None:
    assert succeed("init", "--database", empty).stdout.splitlines() == [
        f"applied {name}" for name in MIGRATIONS
    ]
    assert succeed("init", TAPTWICE_DATABASE_URL=empty).stdout == "nothing to do\n"
    assert count(empty) == 0


def test_init_for_programs(empty: str) -> None:
    assert json.loads(succeed("init", "--json", "--database", empty).stdout) == {
        "applied": MIGRATIONS,
        "waiting": [],
    }
    assert json.loads(succeed("init", "--json", "--database", empty).stdout) == {"applied": [], "waiting": []}


def test_init_in_two_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        sql.Migration("001_pre_a", "CREATE TABLE a (n int)"),
        sql.Migration("002_post_b", "DROP TABLE a"),
    )
    monkeypatch.setattr(sql, "migrations", lambda dialect: steps)
    url = f"sqlite:///{tmp_path}/shop.db"
    assert "--phase pre" in fail(2, "init", "--phase", "post", "--database", url)
    before = succeed("init", "--phase", "pre", "--database", url).stdout
    assert before == "applied 001_pre_a\nleft for the other phase: 002_post_b\n"
    assert succeed("init", "--phase", "post", "--database", url).stdout == "applied 002_post_b\n"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_two_processes_at_once_both_succeed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else request.getfixturevalue("fresh_postgres")
    command = [sys.executable, "-m", "taptwice", "init", "--database", url]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    # They take turns, a migration each: which of them applies what is chance.
    applied = sorted(line for lines in said for line in lines if line != "nothing to do")
    assert applied == [f"applied {name}" for name in MIGRATIONS]


def test_init_names_the_role_that_it_needs(fresh_postgres: str) -> None:
    role = f"poor_{os.getpid()}"
    with psycopg.connect(fresh_postgres, autocommit=True) as admin:
        admin.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'x'; REVOKE CREATE ON SCHEMA public FROM PUBLIC".encode()
        )
        try:
            parts = urlsplit(fresh_postgres)
            url = parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}").geturl()
            assert "permission denied" in fail(2, "init", "--database", url)
        finally:
            admin.execute(f"DROP ROLE {role}".encode())


# --- databases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"])
def test_the_usual_spellings_of_a_postgresql_url(fresh_postgres: str, scheme: str) -> None:
    succeed("init", "--database", fresh_postgres.replace("postgresql", scheme, 1))
    assert count(fresh_postgres) == 0  # the table is there


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_the_usual_spellings_of_an_sqlite_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.chdir(tmp_path)
    succeed("init", "--database", f"{scheme}:///a shop?.db".replace("?", "%3F"))
    assert [path.name for path in tmp_path.iterdir()] == ["a shop%3F.db"]  # as SQLAlchemy reads it
    succeed("init", "--database", f"{scheme}:////{tmp_path}/other.db?timeout=5")
    assert (tmp_path / "other.db").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must begin with"),
        ("shop.db", "must begin with"),
        ("mysql://root@h/shop", "must begin with"),
        ("sqlite://", "names a file"),
        ("sqlite:///", "names a file"),
        ("sqlite:///:memory:", "gone at once"),
        ("host=h dbname=shop", "must begin with"),
    ],
)
def test_a_url_that_names_no_database(url: str, said: str) -> None:
    assert said in fail(2, "init", "--database", url)


def test_a_file_that_is_given_as_a_url_is_said_as_one() -> None:
    assert "did you mean sqlite:///shop.db?" in fail(2, "init", "--database", "shop.db")
    assert "did you mean" not in fail(2, "init", "--database", "app:secret@shop.db")


def test_no_url_names_the_variable() -> None:
    assert "TAPTWICE_DATABASE_URL" in fail(2, "init")


@pytest.mark.parametrize("arguments", [("inspect", "k"), ("sweep",)])
def test_a_typo_makes_no_new_sqlite_file(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert "taptwice init" in fail(2, *arguments, "--database", f"sqlite:///{tmp_path}/shpo.db")
    assert not list(tmp_path.iterdir())


def test_a_database_without_our_tables(empty: str) -> None:
    if empty.startswith("sqlite"):
        Path(empty.removeprefix("sqlite:///")).touch()
    assert "taptwice init" in fail(2, "inspect", "k", "--database", empty)
    assert "taptwice init" in fail(2, "sweep", "--database", empty)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "unable to open" in fail(2, "init", "--database", f"sqlite:///{tmp_path}/no/shop.db")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("a letter to the bank, " * 100)
    assert "not a database" in fail(2, "sweep", "--database", f"sqlite:///{tmp_path}/shop.db")


def test_no_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "psycopg", "asyncpg")
    said = fail(2, "init", "--database", f"postgresql://app:{IN_URL}@db/shop")
    assert "taptwice[postgres]" in said


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("arguments", [("init",), ("inspect", "k"), ("sweep",), ("sweep", "--json")])
def test_a_server_that_does_not_answer(
    driver: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    if driver == "asyncpg":
        without(monkeypatch, "psycopg")
    url = f"postgresql://app:{IN_URL}@127.0.0.1:{unused_port}/shop?password={IN_URL}"
    result = invoke(*arguments, "--database", url)
    assert result.exit_code == 3
    assert len([line for line in result.stderr.splitlines() if line.startswith("Error: ")]) == 1
    assert f"postgresql://app@127.0.0.1:{unused_port}/shop: " in result.stderr
    assert "s3cr" not in result.output


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:s3cr@et@db/shop",
        "postgresql://app:s3cr/et@db/shop",
        "postgresql://app:s3cr#et@db/shop",
        "postgresql://app:s3cr?et@db/shop",
        "postgresql://app:s3cr%zz@127.0.0.1:1/shop",
        "postgresql://app:s3cr%00@127.0.0.1:1/shop",
        "postgresql://app:s3cr@127.0.0.1:port/shop",
        "postgresql://app:s3cr@[::1/shop",
        "postgresql://app:s3cr@127.0.0.1:1/shop?sslmode=perhaps",
        "postgresql://app:s3cr@127.0.0.1:1/shop?nonsense",
        "postgresql://app@127.0.0.1:1/shop?password=s3cr&nonsense=1",
        "postgresql+psycopg://app:s3cr@127.0.0.1:1/shop?sslpassword=s3cr&sslmode=x",
        "mysql://app:s3cr@db/shop",
        "sqlite://app:s3cr@db/shop",
    ],
)
@pytest.mark.parametrize("command", ["init", "sweep"])
def test_no_message_tells_the_password(
    command: str, url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver == "asyncpg":
        without(monkeypatch, "psycopg")
    result = invoke(command, "--database", url)
    assert result.exit_code in (2, 3)
    assert isinstance(result.exception, SystemExit)
    assert "s3cr" not in result.output


def test_a_wrong_password(fresh_postgres: str) -> None:
    parts = urlsplit(fresh_postgres)
    url = parts._replace(netloc=f"nobody:{IN_URL}@{parts.netloc.rpartition('@')[2]}").geturl()
    said = fail(3, "sweep", "--database", url)
    assert "nobody" in said
    assert "s3cr" not in said


def test_what_is_not_expected_is_not_hidden(lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: SqlStore, batch: int) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(SqlStore, "sweep", bug)
    assert isinstance(invoke("sweep", "--database", lite).exception, ZeroDivisionError)


# --- sql ----------------------------------------------------------------------------------------------------


def test_sql_pasted_into_psql_is_what_init_does(fresh_postgres: str) -> None:
    text = succeed("sql", "--dialect", "postgresql").stdout
    with psycopg.connect(fresh_postgres, autocommit=True) as connection:
        connection.execute(text.encode())
    assert succeed("init", "--database", fresh_postgres).stdout == "nothing to do\n"


def test_sql_pasted_into_sqlite_is_what_init_does(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.executescript(succeed("sql", "--dialect", "sqlite").stdout)
    assert succeed("init", "--database", f"sqlite:///{tmp_path}/shop.db").stdout == "nothing to do\n"


class Pasted:
    """Stands in for alembic and Django: collects the statements that a pasted text would run."""

    def __init__(self, text: str) -> None:
        self.statements: list[str] = []
        names: dict[str, Any] = {}
        code = "\n".join(line for line in text.splitlines() if not line.startswith("from "))
        names["op"] = self
        names["migrations"] = self
        exec(code, names)
        if "upgrade" in names:
            names["upgrade"]()

    class Migration:
        pass

    def execute(self, statement: str) -> None:
        self.statements.append(statement)

    def RunSQL(self, statements: list[str]) -> None:
        self.statements += statements


@pytest.mark.parametrize("tool", ["alembic", "django"])
def test_sql_for_postgresql_frameworks(tool: str, fresh_postgres: str) -> None:
    from sqlalchemy import create_engine, text

    pasted = Pasted(succeed("sql", "--dialect", "postgresql", "--for", tool).stdout)
    engine = create_engine(fresh_postgres.replace("://", "+psycopg://"))
    with engine.begin() as connection:
        for statement in pasted.statements:
            # alembic's op.execute wraps a string in text(), which would take a colon for a parameter.
            connection.execute(text(statement))
    engine.dispose()
    assert succeed("init", "--database", fresh_postgres).stdout == "nothing to do\n"
    remember(fresh_postgres, "k")
    succeed("inspect", "k", "--account", "acct_1", "--database", fresh_postgres)


@pytest.mark.parametrize("tool", ["alembic", "django"])
def test_sql_for_sqlite_frameworks(tool: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for statement in Pasted(succeed("sql", "--dialect", "sqlite", "--for", tool).stdout).statements:
            connection.execute(statement)
        connection.commit()
    assert succeed("init", "--database", f"sqlite:///{tmp_path}/shop.db").stdout == "nothing to do\n"


def test_sql_of_one_phase_and_clean_lines() -> None:
    for tool in ("psql", "alembic", "django"):
        pre = succeed("sql", "--dialect", "postgresql", "--for", tool, "--phase", "pre").stdout
        post = succeed("sql", "--dialect", "postgresql", "--for", tool, "--phase", "post").stdout
        assert "001_pre_records" in pre
        assert "001_pre_records" not in post
        assert not re.search(r"[ \t]$", pre, re.MULTILINE)


def test_sql_wants_a_dialect() -> None:
    result = invoke("sql")
    assert result.exit_code == 2
    assert "--dialect" in result.stderr


# --- partitions ---------------------------------------------------------------------------------------------

OPTION = "option_pre_partition_by_day"


@pytest.fixture(params=["psycopg", "asyncpg"])
def server(request: pytest.FixtureRequest, fresh_postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "asyncpg":
        without(monkeypatch, "psycopg")
    return fresh_postgres


def test_init_partitions_a_table_that_is_there(server: str) -> None:
    succeed("init", "--database", server)
    remember(server, "k-1")
    arguments = ("init", "--partition-by", "day", "--database", server)
    assert succeed(*arguments).stdout == f"applied {OPTION}\n"
    assert succeed(*arguments).stdout == "nothing to do\n"
    assert succeed("init", "--database", server).stdout == "nothing to do\n"
    remember(server, "k-2")
    for key in ("k-1", "k-2"):
        for account in ((), ("--account", "acct_1")):
            result = succeed("inspect", key, *account, "--database", server)
            assert re.search(rf"^key +{key}$", result.stdout, re.MULTILINE)


def test_sweep_tells_of_the_partitions(server: str) -> None:
    succeed("init", "--partition-by", "day", "--database", server)
    past, coming = time.time() - 3 * DAY, f"taptwice_records_{datetime.now(UTC) + timedelta(days=2):%Y%m%d}"
    with psycopg.connect(server) as connection:
        rows = connection.execute("SELECT partition FROM taptwice_partitions(%s)", (past,)).fetchall()
        connection.execute(f"DROP TABLE {coming}".encode())
    days = [name for (name,) in rows]
    remember(server, "deleted", made=9 * DAY)
    remember(server, "dropped", made=4 * DAY)
    remember(server, "alive")
    assert json.loads(succeed("sweep", "--json", "--database", server).stdout) == {
        "removed": 1,
        "batches": 1,
        "done": True,
        "partitions_dropped": days,
        "partitions_created": [coming],
    }
    assert count(server) == 1
    assert succeed("sweep", "--database", server).stdout == "removed 0 expired records\n"


def test_sweep_tells_people_of_the_partitions(server: str) -> None:
    succeed("init", "--partition-by", "day", "--database", server)
    with psycopg.connect(server) as connection:
        connection.execute("SELECT taptwice_partitions(%s)", (1_772_323_200.0,))  # 2026-03-01
        connection.execute("DROP TABLE taptwice_records_20260303")
    dropped = "dropped 2 partitions: taptwice_records_20260301, taptwice_records_20260302"
    said = succeed("sweep", "--database", server).stdout
    assert said == f"removed 0 expired records\n{dropped}\n"


def test_sweep_that_is_kept_from_the_partitions_says_so(server: str) -> None:
    succeed("init", "--partition-by", "day", "--database", server)
    remember(server, "old", made=2 * DAY)
    with psycopg.connect(server) as busy, psycopg.connect(server) as other:
        other.execute("SELECT taptwice_partitions(1772323200)")
        other.commit()
        busy.execute("SELECT 1 FROM taptwice_records")
        result = invoke("sweep", "--database", server)
    assert result.exit_code == 3
    assert result.stdout == "removed 1 expired records\n"
    assert "were using taptwice_records; sweep again" in result.stderr


def test_partitions_are_for_postgresql_alone(tmp_path: Path) -> None:
    arguments = ("--partition-by", "day")
    said = fail(2, "init", *arguments, "--database", f"sqlite:///{tmp_path}/shop.db")
    assert "PostgreSQL only" in said
    assert "PostgreSQL only" in fail(2, "sql", "--dialect", "sqlite", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tool", ["psql", "alembic", "django"])
def test_sql_of_the_partitions_is_what_init_does(tool: str, fresh_postgres: str) -> None:
    from sqlalchemy import create_engine, text

    printed = succeed("sql", "--dialect", "postgresql", "--partition-by", "day", "--for", tool).stdout
    if tool == "psql":
        with psycopg.connect(fresh_postgres, autocommit=True) as connection:
            connection.execute(printed.encode())
    else:
        engine = create_engine(fresh_postgres.replace("://", "+psycopg://"))
        with engine.begin() as connection:
            for statement in Pasted(printed).statements:
                connection.execute(text(statement))
        engine.dispose()
    assert succeed("init", "--partition-by", "day", "--database", fresh_postgres).stdout == "nothing to do\n"
    remember(fresh_postgres, "k")
    with psycopg.connect(fresh_postgres) as connection:
        found = connection.execute("SELECT tableoid::regclass::text FROM taptwice_records").fetchone()
    assert found is not None
    assert re.fullmatch(r"taptwice_records_\d{8}", found[0])


# --- inspect ------------------------------------------------------------------------------------------------


def test_inspect_shows_all_but_what_is_confidential(database: str) -> None:
    remember(database, "k-1", headers=(("content-type", "text/plain"), ("location", "/charges/7")))
    remember(database, "k-1", account="acct_2")
    result = succeed("inspect", "k-1", "--account", "acct_1", "--database", database)
    assert result.stderr == ""
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.stdout.splitlines())
    assert shown["key"] == "k-1"
    assert shown["account"] == "acct_1"
    assert shown["id"] == Keyed("acct_1", "k-1").id.hex()
    digest = fingerprint.of_bytes(b"x").digest()
    assert digest is not None
    assert shown["fingerprint"] == f"version {fingerprint.of_bytes(b'x').version}, {digest.hex()}"
    assert shown["status"] == "201"
    assert shown["headers"] == "content-type, location (43 bytes)"
    assert shown["body"] == "4 bytes"
    assert shown["created"] < shown["expires"]
    assert "paid" not in result.stdout
    assert "charges/7" not in result.stdout


def test_inspect_shows_the_answer_when_told(database: str) -> None:
    remember(database, "k-1", headers=(("x", "\x1b[31m"),), body=b"paid\n\x1b]0;evil\x07\xff")
    lines = succeed(
        "inspect", "k-1", "--body", "--account", "acct_1", "--database", database
    ).stdout.splitlines()
    assert lines[-5:] == ["", "x: \\x1b[31m", "", "paid", "\\x1b]0;evil\\x07\\xff"]


def test_inspect_for_programs(database: str) -> None:
    remember(database, "k-1", made=60)
    remember(database, "k-1", account="acct_2", status=402, headers=(), body=None)
    result = succeed("inspect", "k-1", "--json", "--database", database)
    assert result.stderr == "no --account: reading the whole table\n"
    first, second = json.loads(result.stdout)
    assert (first["account"], first["body_bytes"], first["tombstone"]) == ("acct_1", 4, False)
    assert (second["account"], second["body_bytes"], second["tombstone"]) == ("acct_2", 0, True)
    assert (first["header_names"], second["header_names"]) == (["content-type"], [])
    assert not {"headers", "body_base64"} & set(first)
    with_body = json.loads(succeed("inspect", "k-1", "--json", "--body", "--database", database).stdout)
    assert with_body[0]["headers"] == [["content-type", "text/plain"]]
    assert base64.b64decode(with_body[0]["body_base64"]) == b"paid"
    assert with_body[1]["body_base64"] is None


def test_inspect_says_that_an_answer_was_not_kept(lite: str) -> None:
    remember(lite, "k-1", body=None)
    assert (
        "not kept (tombstone)" in succeed("inspect", "k-1", "--account", "acct_1", "--database", lite).stdout
    )


def test_inspect_finds_what_was_stored_without_its_key(lite: str) -> None:
    remember(lite, "k-1", in_clear=False)
    assert "--account" in fail(1, "inspect", "k-1", "--database", lite)
    assert (
        "not kept in the clear" in succeed("inspect", "k-1", "--account", "acct_1", "--database", lite).stdout
    )


def test_inspect_of_what_is_not_there(database: str) -> None:
    remember(database, "k-1")
    for arguments in (("k-2",), ("k-1", "--account", "acct_9"), ("k-1", "--account", "acct_9", "--json")):
        assert "no record" in fail(1, "inspect", *arguments, "--database", database)


def test_inspect_of_a_key_as_it_stands_in_the_header(lite: str) -> None:
    remember(lite, 'order-"47"')
    remember(lite, '"half')
    assert 'order-"47"' in succeed("inspect", '"order-\\"47\\""', "--database", lite).stdout
    assert '"half' in succeed("inspect", '"half', "--database", lite).stdout


def test_inspect_of_what_cannot_be_a_key(lite: str) -> None:
    assert "blank" in fail(2, "inspect", "", "--database", lite)
    assert "printable" in fail(2, "inspect", "k\n1", "--account", "acct_1", "--database", lite)


def test_inspect_says_when_there_may_be_more(lite: str) -> None:
    for number in range(cli.SEARCH_LIMIT):
        remember(lite, "k-1", account=f"acct_{number}")
    assert "the oldest 100" in succeed("inspect", "k-1", "--database", lite).stderr


def test_inspect_does_not_wait_for_a_writer(lite: str) -> None:
    remember(lite, "k-1")
    with connected(lite) as connection:
        connection.isolation_level = None
        connection.execute("BEGIN IMMEDIATE")
        assert "k-1" in succeed("inspect", "k-1", "--database", lite).stdout


# --- sweep --------------------------------------------------------------------------------------------------


def expired(url: str, number: int) -> None:
    for each in range(number):
        remember(url, f"old-{each}", made=DAY + 60)
    remember(url, "young", made=DAY - 60)


def swept(**done: Any) -> dict[str, Any]:
    """What a sweep tells of a table without partitions."""
    return {**done, "partitions_dropped": [], "partitions_created": []}


def test_sweep_removes_what_is_over_and_nothing_else(database: str) -> None:
    expired(database, 5)
    result = succeed("sweep", "--batch", "2", "--database", database)
    assert result.stdout == "removed 5 expired records\n"
    assert result.stderr == ""  # not a terminal: no progress
    assert count(database) == 1
    succeed("inspect", "young", "--account", "acct_1", "--database", database)
    assert succeed("sweep", "--database", database).stdout == "removed 0 expired records\n"


def test_sweep_is_bounded(database: str) -> None:
    expired(database, 5)
    arguments = ("sweep", "--batch", "2", "--max-batches", "2", "--database", database)
    assert json.loads(succeed(*arguments, "--json").stdout) == swept(removed=4, batches=2, done=False)
    assert count(database) == 2
    assert succeed("sweep", "--batch", "1", "--max-batches", "1", "--database", database).stdout == (
        "removed 1 expired records; there may be more\n"
    )
    assert json.loads(succeed(*arguments, "--json").stdout) == swept(removed=0, batches=1, done=True)


@pytest.mark.parametrize("option", ["--batch", "--max-batches"])
def test_sweep_wants_sensible_bounds(lite: str, option: str) -> None:
    assert f"Invalid value for '{option}'" in fail(2, "sweep", option, "0", "--database", lite)


@pytest.mark.parametrize("as_json", [True, False])
def test_sweep_that_is_stopped_keeps_what_was_committed(
    lite: str, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    from taptwice.drivers.sqlite import SqliteExecutor

    expired(lite, 6)
    commit, commits = SqliteExecutor.commit, 0

    def stopped(self: SqliteExecutor, command: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == 3:
            raise KeyboardInterrupt
        commit(self, command)

    monkeypatch.setattr(SqliteExecutor, "commit", stopped)
    result = invoke("sweep", "--batch", "2", "--database", lite, *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert count(lite) == 7 - 4
    if as_json:
        assert json.loads(result.stdout) == swept(removed=4, batches=2, done=False)
    else:
        assert result.stdout == "removed 4 expired records; there may be more\n"
    assert "rolled back" in result.stderr


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_ctrl_c_while_the_server_lets_wait(driver: str, fresh_postgres: str) -> None:
    succeed("init", "--database", fresh_postgres)
    program = "from taptwice import cli, cli_database\n"
    if driver == "asyncpg":
        program += "def missing(url): raise ImportError\ncli_database._through_psycopg = missing\n"
    program += "cli.main(prog_name='taptwice')\n"
    with psycopg.connect(fresh_postgres) as other:
        other.execute("LOCK TABLE taptwice_records")
        command = [sys.executable, "-c", program, "sweep", "--json", "--database", fresh_postgres]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with psycopg.connect(fresh_postgres, autocommit=True) as watcher:
            waiting = (
                b"SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'taptwice_records'::regclass"
            )
            deadline = time.monotonic() + 30
            while watcher.execute(waiting).fetchone() == (0,) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert watcher.execute(waiting).fetchone() == (1,), "it waits for the lock"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(out) == swept(removed=0, batches=0, done=False)
    assert "Traceback" not in err


class Terminal:
    """Stands in for a stderr that somebody looks at."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


@pytest.mark.parametrize("rich", [True, False])
def test_sweep_shows_its_progress_to_a_person(
    lite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rich: bool
) -> None:
    expired(lite, 3)
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    cli.main(["sweep", "--batch", "2", "--database", lite], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out == "removed 3 expired records\n"
    if rich:
        assert "3 removed in 2 batches" in said.err
    else:
        assert said.err == "2 removed in 1 batch\n3 removed in 2 batches\n"


# --- help ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(cli.main.commands))
def test_every_command_shows_examples_that_parse(name: str) -> None:
    command = cli.main.commands[name]
    assert command.help is not None
    examples = [
        line.split("#")[0].split("|")[0] for line in command.help.splitlines() if f"taptwice {name}" in line
    ]
    assert len(examples) >= 2
    for example in examples:
        words = example.split(f"taptwice {name}")[1].split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAPTWICE_DATABASE_URL", "sqlite:///x")
            command.make_context(name, words)
    assert "Examples:" in succeed(name, "--help").output


def test_the_group_lists_its_commands() -> None:
    assert set(cli.main.commands) == {"conformance", "init", "inspect", "intents", "sql", "sweep"}
    help_ = succeed("--help").output
    assert "Exit codes" in help_
    assert succeed("--version").output.startswith("taptwice, version ")


def test_the_library_does_without_click() -> None:
    check = "import sys, taptwice; sys.exit('click' in sys.modules or 'taptwice.cli' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
