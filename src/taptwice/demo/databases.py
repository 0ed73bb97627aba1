"""Where the demo plays. Whatever it makes there has a name of its own, and is gone afterwards.

Blocking, and used from the event loop all the same: what a Ctrl-C interrupts is then never still under way in
a thread while the tables are removed.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from taptwice import drivers
from taptwice.core.plan import run
from taptwice.errors import TaptwiceError
from taptwice.flows.migrate import migrate

USAGE, UNAVAILABLE = 2, 3
"""Exit codes, as those of `taptwice`."""


class DemoError(Exception):
    """Ends the demo with this message and exit code."""

    def __init__(self, message: str, code: int = UNAVAILABLE) -> None:
        super().__init__(message)
        self.code = code


class Database(Protocol):
    """A place for the tables of the demo."""

    product: str
    where: str
    url: str
    """As SQLAlchemy reads it. It may hold a password."""

    def empty(self) -> None:
        """Remove all rows; ids begin at 1 again."""

    def charges(self) -> list[tuple[int, int]]:
        """All rows of the table: id and amount."""


@contextmanager
def opened(url: str | None) -> Iterator[Database]:
    """A temporary SQLite file, or a schema of its own in the PostgreSQL database of the URL."""
    if url is None:
        place = _sqlite()
    elif match := re.fullmatch(r"(?:postgresql|postgres)(?:\+\w+)?(://.*)", url, re.DOTALL):
        place = _postgres(f"postgresql{match[1]}")
    else:
        raise DemoError("--database takes a URL postgresql://…; without it the demo plays on SQLite", USAGE)
    try:
        with place as database:
            yield database
    except (TaptwiceError, sqlite3.Error) as error:
        raise DemoError(_in_one_line(error)) from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Who presses Ctrl-C twice still wants nothing left behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- SQLite -------------------------------------------------------------------------------------------------


@contextmanager
def _sqlite() -> Iterator[Database]:
    folder = Path(tempfile.mkdtemp(prefix="taptwice-demo-"))
    try:
        database = SqliteFile(folder / "payments.db")
        run(migrate("sqlite"), drivers.source(database.connect).open().execute)
        yield database
    finally:
        with _uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)


class SqliteFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.product = f"SQLite {sqlite3.sqlite_version}"
        self.where = str(path)
        self.url = f"sqlite+aiosqlite:///{path}"

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def empty(self) -> None:
        with closing(self.connect()) as connection, connection:
            connection.execute("DELETE FROM charges")
            connection.execute("DELETE FROM taptwice_records")

    def charges(self) -> list[tuple[int, int]]:
        with closing(self.connect()) as connection:
            return connection.execute("SELECT id, amount_cents FROM charges ORDER BY id").fetchall()


# --- PostgreSQL ---------------------------------------------------------------------------------------------


@contextmanager
def _postgres(url: str) -> Iterator[Database]:
    import psycopg

    try:
        database = PostgresSchema(url)
    except psycopg.ProgrammingError:  # its message quotes the URL, password and all
        raise DemoError(
            "cannot read the database URL; in user and password write % @ : / ? # as %25 %40 %3A %2F %3F %23",
            USAGE,
        ) from None
    try:
        database.make()
        yield database
    except psycopg.Error as error:
        raise DemoError(f"{database.where}: {_in_one_line(error)}") from error
    finally:
        with _uninterrupted():
            database.drop()


class PostgresSchema:
    def __init__(self, url: str) -> None:
        from psycopg.conninfo import conninfo_to_dict
        from sqlalchemy import URL

        self.schema = f"taptwice_demo_{secrets.token_hex(4)}"
        self._made = False
        given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
        given.setdefault("connect_timeout", "5")
        # That schema alone: no statement can mean a table of the same name elsewhere.
        options = (given.get("options", ""), f"-c search_path={self.schema}", "-c lock_timeout=5s")
        given["options"] = " ".join(options).strip()
        self.given = given
        rest = dict(given)
        host, port = rest.pop("host", None), rest.pop("port", None)
        plain = host is not None and not re.search(r"[/,]", host)  # else a socket's folder, or several hosts
        self.url = URL.create(
            "postgresql+psycopg",
            username=rest.pop("user", None),
            password=rest.pop("password", None),
            host=host if plain else None,
            port=int(port) if plain and port else None,
            database=rest.pop("dbname", None),
            query=rest if plain else {**rest, **_present(host=host, port=port)},
        ).render_as_string(hide_password=False)
        shown = f"database {given['dbname']!r}" if "dbname" in given else "the default database"
        self.where = f"schema {self.schema} in {shown}" + (f" on {host}" if host else "")
        self.product = "PostgreSQL"

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(**self.given)  # type: ignore[arg-type]  # any parameter of libpq

    def make(self) -> None:
        with self.connect() as connection:
            self.product = f"PostgreSQL {connection.info.parameter_status('server_version')}"
            self._made = True  # from here on it may be there, whatever becomes of this process
            connection.execute(f"CREATE SCHEMA {self.schema}")
        run(migrate("postgresql"), drivers.source(self.connect).open().execute)

    def empty(self) -> None:
        with self.connect() as connection:
            connection.execute("TRUNCATE charges, taptwice_records RESTART IDENTITY")

    def charges(self) -> list[tuple[int, int]]:
        with self.connect() as connection:
            rows: list[tuple[int, int]] = connection.execute(
                "SELECT id, amount_cents FROM charges ORDER BY id"
            ).fetchall()
        return rows

    def drop(self) -> None:
        """The schema and what is in it: nothing else was made."""
        import psycopg

        if not self._made:
            return
        try:
            with self.connect() as connection:
                connection.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")
        except psycopg.Error as error:
            raise DemoError(
                f"{self.where} could not be removed ({_in_one_line(error)}); do it with: "
                f"DROP SCHEMA {self.schema} CASCADE"
            ) from error


def _present(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
