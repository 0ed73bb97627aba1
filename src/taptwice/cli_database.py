"""What all commands with a database share: its URL, what may go wrong with it, how things are printed."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import click

from taptwice import drivers, sql
from taptwice.core.plan import Plan, arun, run
from taptwice.errors import Contention, Misuse, StoreUnavailable, TaptwiceError

Result = TypeVar("Result")

CONNECT_TIMEOUT = 10
"""Seconds. A command line that hangs tells nobody anything; `connect_timeout=` in the URL overrides it."""

UNREADABLE = "cannot read the database URL; in user and password write % @ : / ? # as %25 %40 %3A %2F %3F %23"


# --- failures -----------------------------------------------------------------------------------------------


class Failed(click.ClickException):
    """An expected failure: one line on stderr and an exit code, here that of a wrong configuration."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NotFound(Failed):
    """There is no such record."""

    exit_code = 1


class Unavailable(Failed):
    """The database cannot be used now."""

    exit_code = 3


_WRONG_FILE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN)
"""What SQLite says of a path that no waiting makes right."""

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C stopped, as shells have it."""


@contextmanager
def expected(database: Database) -> Iterator[None]:
    """Turns what may go wrong into `Failed`. What is left is a bug of ours, and shows its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped; what was under way is rolled back", err=True)
        sys.exit(INTERRUPTED)
    except TaptwiceError as error:
        wrong_file = getattr(error.__cause__, "sqlite_errorcode", None) in _WRONG_FILE
        temporary = isinstance(error, StoreUnavailable | Contention) and not wrong_file
        message = error.detail
        if getattr(error.__cause__, "sqlstate", None) == "42501":
            message = f"{error.__cause__}: this needs a role that owns taptwice's tables, or may create them"
        raise database.failure(Unavailable if temporary else Failed, message) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("psycopg", "asyncpg", "sqlite3"):
            raise
        raise database.failure(Failed, f"the database refused: {error}") from error


# --- databases ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Database:
    """What a URL names: how to connect, and how to speak of it without its password."""

    shown: str
    connect: Callable[[], Any] = field(repr=False)
    source: drivers.Source
    secrets: tuple[str, ...] = field(repr=False, default=())

    @property
    def dialect(self) -> sql.Dialect:
        return self.source.dialect

    def failure(self, kind: type[Failed], message: str) -> Failed:
        """A failure that names the database. Drivers quote the URL in some messages."""
        for secret in self.secrets:
            message = message.replace(secret, "***")
        return kind(f"{self.shown}: {message}")

    def drive(self, plan: Plan[Result]) -> Result:
        """Carry out a plan that begins and ends its transactions itself."""
        execute = self.source.open().execute
        return run(plan, execute) if self.source.blocking else asyncio.run(arun(plan, execute))

    def read(self, plan: Plan[Result]) -> Result:
        """Carry out a plan that only reads, without a transaction: on SQLite ours would stop all writers."""
        if not self.source.blocking:
            return asyncio.run(self._aread(plan))
        connection = self.connect()
        try:
            return run(plan, drivers.join(connection).execute)
        finally:
            connection.close()

    async def _aread(self, plan: Plan[Result]) -> Result:
        connection = await self.connect()
        try:
            return await arun(plan, drivers.join(connection).execute)
        finally:
            await connection.close()


def open_database(url: str, create: bool = False) -> Database:
    """The database of a URL. `create`: an SQLite file may be made; a typo must not make one elsewhere."""
    if match := re.fullmatch(r"(?:postgresql|postgres)(?:\+\w+)?(://.*)", url, re.DOTALL):
        return _postgres(f"postgresql{match[1]}")
    if match := re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url):
        return _sqlite(Path(match[1]), create)
    if url.startswith("sqlite"):
        raise Failed("an SQLite URL names a file: sqlite:///relative/path.db or sqlite:////absolute/path.db")
    # Nothing that may hold a password is quoted.
    meant = f"; did you mean sqlite:///{url}?" if re.fullmatch(r"[^:@]+\.(?:db|sqlite3?)", url) else ""
    raise Failed(f"the database URL must begin with postgresql:// or sqlite:///{meant}")


def _sqlite(path: Path, create: bool) -> Database:
    shown = f"sqlite:///{path}"
    if str(path) == ":memory:":
        raise Failed("a database in memory is empty and gone at once: name a file")
    if not create and not path.exists():
        raise Failed(f"{shown}: there is no such file; `taptwice init` makes it")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}", uri=True)

    from taptwice.drivers import sqlite

    return Database(shown, connect, sqlite.connecting(connect))


def _postgres(url: str) -> Database:
    address, secrets = _parts(url)
    shown = f"postgresql://{address}"
    try:
        return Database(shown, *_through_psycopg(url), secrets)
    except ImportError:
        pass
    try:
        return Database(shown, *_through_asyncpg(url), secrets)
    except ImportError:
        raise Failed(
            "no driver for PostgreSQL is installed: pip install 'taptwice[postgres]' (or taptwice[asyncpg])"
        ) from None


def _parts(url: str) -> tuple[str, tuple[str, ...]]:
    """The URL without passwords and settings, and its passwords as drivers may quote them."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        raise Failed(UNREADABLE) from None
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    hosts_are_good = all(re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?", host) for host in hosts.split(","))
    settings_are_good = all("=" in setting for setting in parts.query.split("&") if setting)
    cut_short = not login and "@" in parts.path + parts.fragment
    if "@" in login or cut_short or not hosts_are_good or not settings_are_good:
        # Not a word of it is quoted: which part is the password is just what cannot be told.
        raise Failed(UNREADABLE)
    settings = parse_qs(parts.query)
    passwords = [password, *settings.get("password", ()), *settings.get("sslpassword", ())]
    secrets = {form for each in passwords for form in (each, unquote(each)) if form}
    # The longest first: one may be a part of another.
    return f"{user}{'@' if user else ''}{hosts}{parts.path}", tuple(
        sorted({url, *secrets}, key=len, reverse=True)
    )


def _through_psycopg(url: str) -> tuple[Callable[[], Any], drivers.Source]:
    import psycopg as library
    from psycopg.conninfo import make_conninfo

    from taptwice.drivers import psycopg

    limit = {} if "connect_timeout" in url else {"connect_timeout": CONNECT_TIMEOUT}

    def connect() -> library.Connection[Any]:
        try:
            return library.connect(make_conninfo(url, **limit))
        except library.OperationalError as error:
            raise StoreUnavailable(str(error)) from error

    return connect, psycopg.connecting(connect)


def _through_asyncpg(url: str) -> tuple[Callable[[], Any], drivers.Source]:
    import asyncpg as library

    from taptwice.drivers import asyncpg

    async def connect() -> Any:
        try:
            return await library.connect(url, timeout=CONNECT_TIMEOUT)
        except ValueError as error:
            raise Misuse(f"asyncpg cannot read the URL: {error}") from error
        except (library.PostgresError, library.InterfaceError, OSError, TimeoutError) as error:
            raise StoreUnavailable(str(error) or "no answer") from error

    return connect, asyncpg.connecting(connect)


# --- options and printing -----------------------------------------------------------------------------------


database_option = click.option(
    "--database",
    "url",
    envvar="TAPTWICE_DATABASE_URL",
    show_envvar=True,
    required=True,
    metavar="URL",
    help="postgresql://user:password@host/name or sqlite:///path; postgresql+psycopg:// will do.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def print_json(value: Any) -> None:
    """The result, for programs."""
    click.echo(json.dumps(value, indent=2))


def time_text(moment: float) -> str:
    """Seconds since 1970, for people and for programs."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")


def harmless(text: str) -> str:
    """Text of strangers, unable to steer the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
