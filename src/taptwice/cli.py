"""The command line: make the tables, look at a record, remove old ones.

Exit codes: 0 done, 1 not found, 2 wrong usage or configuration, 3 the database cannot be used now,
130 stopped by Ctrl-C. Results go to stdout, everything else to stderr. A password in a URL is never printed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import parse_qs, unquote, urlsplit

import click

from taptwice import drivers, sql
from taptwice.conformance.cli import conformance
from taptwice.core.header import check_key
from taptwice.core.model import pack_headers
from taptwice.core.plan import Plan, arun, run
from taptwice.errors import Contention, Misuse, StoreUnavailable, TaptwiceError
from taptwice.flows.migrate import BOTH, migrate
from taptwice.flows.retention import sweep_turn
from taptwice.stores.sql import Inspected, SqlStore

Result = TypeVar("Result")
Tool = Literal["psql", "alembic", "django"]

CONNECT_TIMEOUT = 10
"""Seconds. A command line that hangs tells nobody anything; `connect_timeout=` in the URL overrides it."""

UNREADABLE = "cannot read the database URL; in user and password write % @ : / ? # as %25 %40 %3A %2F %3F %23"

SEARCH_LIMIT = 100
"""How many records the statement `search` gives at most."""


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


INTERRUPTED = 130
"""Exit code of a program that Ctrl-C stopped, as shells have it."""


@contextmanager
def _expected(database: Database) -> Iterator[None]:
    """Turns what may go wrong into `Failed`. What is left is a bug of ours, and shows its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped; what was under way is rolled back", err=True)
        sys.exit(INTERRUPTED)
    except TaptwiceError as error:
        temporary = isinstance(error, StoreUnavailable | Contention)
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


def _database(url: str, create: bool = False) -> Database:
    """The database of a URL. `create`: an SQLite file may be made; a typo must not make one elsewhere."""
    if match := re.fullmatch(r"(?:postgresql|postgres)(?:\+\w+)?(://.*)", url, re.DOTALL):
        return _postgres(f"postgresql{match[1]}")
    if match := re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url):
        return _sqlite(Path(match[1]), create)
    if url.startswith("sqlite"):
        raise Failed("an SQLite URL names a file: sqlite:///relative/path.db or sqlite:////absolute/path.db")
    raise Failed("the database URL must begin with postgresql:// or sqlite:///")


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


# --- commands -----------------------------------------------------------------------------------------------


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
phase_option = click.option(
    "--phase",
    type=click.Choice(BOTH),
    help="Only what runs before the new code is deployed (pre), or after the old code is gone (post).",
)


@click.group("taptwice", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="taptwice")
def main() -> None:
    """Idempotency keys: make their tables, look at a record, remove old ones.

    Exit codes: 0 done, 1 not found, 2 wrong usage or configuration, 3 the database cannot be used now.
    """


main.add_command(conformance)


@main.command()
@database_option
@phase_option
@json_option
def init(url: str, phase: sql.Phase | None, as_json: bool) -> None:
    """Make the tables, or bring them up to this release.

    Applies what is missing, each migration in a transaction of its own. Running it again, or in several
    processes at once, is safe.

    \b
    Examples:
      taptwice init --database postgresql://app@db/shop
      TAPTWICE_DATABASE_URL=sqlite:///shop.db taptwice init
      taptwice init --phase pre       # before a deploy
      taptwice init --phase post      # when the old code is gone
    """
    database = _database(url, create=True)
    with _expected(database):
        done = database.drive(migrate(database.dialect, (phase,) if phase else BOTH))
    if as_json:
        _print_json({"applied": done.applied, "waiting": done.waiting})
        return
    for name in done.applied:
        click.echo(f"applied {name}")
    if not done.applied:
        click.echo("nothing to do")
    if done.waiting:
        click.echo(f"left for the other phase: {', '.join(done.waiting)}")


@main.command("sql")
@click.option("--dialect", type=click.Choice(get_args(sql.Dialect)), required=True)
@click.option(
    "--for",
    "tool",
    type=click.Choice(get_args(Tool)),
    default="psql",
    show_default=True,
    help="Where it will be pasted.",
)
@phase_option
def sql_(dialect: sql.Dialect, tool: Tool, phase: sql.Phase | None) -> None:
    """Print the migrations as text, to paste. No database is touched.

    They are recorded as `taptwice init` does, which will find nothing to do afterwards.

    \b
    Examples:
      taptwice sql --dialect postgresql | psql shop
      taptwice sql --dialect postgresql --for alembic
      taptwice sql --dialect sqlite --for django
    """
    steps = [each for each in sql.migrations(dialect) if phase in (None, each.phase)]
    click.echo(_PRINTERS[tool](dialect, steps), nl=False)


@main.command()
@click.argument("key")
@database_option
@click.option("--account", help="Whose key it is. Without it the whole table is read.")
@click.option("--body", is_flag=True, help="Show the answer's body and the values of its headers too.")
@json_option
def inspect(key: str, url: str, account: str | None, body: bool, as_json: bool) -> None:
    """Show what is remembered of an idempotency KEY.

    Body and header values of the saved answer may be confidential, and are shown only with --body.

    \b
    Examples:
      taptwice inspect 8e03978e-40d5-43e8-bc93-6894a57f9324 --account acct_42
      taptwice inspect order-7 --json | jq .[0].status
    """
    database = _database(url)
    if account is None:
        click.echo("no --account: reading the whole table", err=True)
    with _expected(database):
        found = database.read(SqlStore(database.dialect).inspect(check_key(key), account))
    if not found:
        hint = (
            "look into all accounts by leaving --account out"
            if account is not None
            else "a table that keeps only hashes is searched with --account"
        )
        raise database.failure(NotFound, f"no record of this key ({hint})")
    if as_json:
        _print_json([_as_json(each, body) for each in found])
    else:
        click.echo("\n\n".join(_as_text(each, body) for each in found))
    if len(found) == SEARCH_LIMIT:
        click.echo(f"these are the oldest {SEARCH_LIMIT}; there may be more", err=True)


@main.command()
@database_option
@click.option(
    "--batch", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows in a transaction."
)
@click.option(
    "--max-batches", type=click.IntRange(min=1), help="Stop after so many; without it, when none is left."
)
@json_option
def sweep(url: str, batch: int, max_batches: int | None, as_json: bool) -> None:
    """Remove the records whose window is over.

    In short transactions, beside the running service. A record within its window is never removed. It
    may be stopped at any time: what was removed stays removed, and the next run goes on.

    \b
    Examples:
      taptwice sweep
      taptwice sweep --batch 500 --max-batches 20 --json      # from cron
    """
    database = _database(url)
    store = SqlStore(database.dialect)
    removed = batches = 0
    more = True
    try:
        with _progress() as tell, _expected(database):
            while more and (max_batches is None or batches < max_batches):
                count = database.drive(sweep_turn(store, batch))
                removed, batches, more = removed + count, batches + 1, count == batch
                tell(f"{removed} removed in {batches} {'batch' if batches == 1 else 'batches'}")
    finally:
        # Also when it was stopped: what is done is done.
        if as_json:
            _print_json({"removed": removed, "batches": batches, "done": not more})
        elif batches:
            click.echo(f"removed {removed} expired records{'; there may be more' if more else ''}")


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Says how far it is, to a person alone: a log of a cron job needs no progress."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda text: click.echo(text, err=True)
        return
    with Console(stderr=True).status("sweeping") as status:
        yield status.update


# --- printing -----------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")


def _size(content: bytes | None) -> int:
    return len(content or b"")


def _as_json(found: Inspected, body: bool) -> dict[str, Any]:
    record, answer = found.record, found.record.answer
    shown: dict[str, Any] = {
        "id": found.id,
        "account": found.account,
        "key": found.key,
        "fingerprint_version": record.version,
        "fingerprint": record.digest.hex(),
        "status": answer.status,
        "created_at": _time(record.created_at),
        "expires_at": _time(found.expires_at),
        "header_names": [name for name, _ in answer.headers],
        "headers_bytes": _size(pack_headers(answer.headers)),
        "body_bytes": _size(answer.body),
        "tombstone": answer.body is None,
    }
    if body:
        shown["headers"] = answer.headers
        shown["body_base64"] = None if answer.body is None else base64.b64encode(answer.body).decode()
    return shown


def _as_text(found: Inspected, body: bool) -> str:
    record, answer = found.record, found.record.answer
    size = "not kept (tombstone)" if answer.body is None else f"{len(answer.body)} bytes"
    names = ", ".join(name for name, _ in answer.headers) or "none"
    lines = {
        "key": "not kept in the clear" if found.key is None else found.key,
        "account": "not kept in the clear" if found.account is None else found.account,
        "id": found.id,
        "fingerprint": f"version {record.version}, {record.digest.hex()}",
        "status": str(answer.status),
        "created": _time(record.created_at),
        "expires": _time(found.expires_at),
        "headers": f"{names} ({_size(pack_headers(answer.headers))} bytes)",
        "body": size,
    }
    shown = [f"{name:<11}  {_harmless(value)}" for name, value in lines.items()]
    if body:
        shown += ["", *(_harmless(f"{name}: {value}") for name, value in answer.headers)]
        shown += ["", *map(_harmless, (answer.body or b"").decode(errors="backslashreplace").splitlines())]
    return "\n".join(shown)


def _harmless(text: str) -> str:
    """Text of strangers, unable to steer the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _texts(dialect: sql.Dialect, step: sql.Migration) -> list[str]:
    """All statements of a step, and the one that records it."""
    record = sql.statements(dialect)["record_migration"].compiled(lambda name, position: f"'{step.name}'")
    return [*step.statements, record]


def _for_psql(dialect: sql.Dialect, steps: list[sql.Migration]) -> str:
    blocks = [f"{sql.MIGRATIONS_TABLE};"]
    for step in steps:
        record = _texts(dialect, step)[-1]
        # The text itself, not its statements: here its comments can stay.
        blocks.append(f"-- {step.name}\nBEGIN;\n\n{step.text.strip()}\n\n{record};\n\nCOMMIT;")
    return "\n\n".join(blocks) + "\n"


def _for_alembic(dialect: sql.Dialect, steps: list[sql.Migration]) -> str:
    lines = ["from alembic import op", "", "", "def upgrade() -> None:"]
    lines += [f"    op.execute({_literal(sql.MIGRATIONS_TABLE)})"]
    for step in steps:
        lines += ["", f"    # taptwice: {step.name}"]
        lines += [f"    op.execute({_literal(text)})" for text in _texts(dialect, step)]
    return "\n".join(lines) + "\n"


def _for_django(dialect: sql.Dialect, steps: list[sql.Migration]) -> str:
    lines = ["from django.db import migrations", "", "", "class Migration(migrations.Migration):"]
    lines += ["    dependencies = []  # the latest migration of this app", "    operations = ["]
    lines += [f"        migrations.RunSQL([{_literal(sql.MIGRATIONS_TABLE)}]),"]
    for step in steps:
        # A list: Django then runs each as it is, and cuts nothing at the semicolons of a function's body.
        lines += [f"        # taptwice: {step.name}", "        migrations.RunSQL(", "            ["]
        lines += [f"                {_literal(text)}," for text in _texts(dialect, step)]
        lines += ["            ]", "        ),"]
    return "\n".join([*lines, "    ]"]) + "\n"


def _literal(statement: str) -> str:
    lines = "\n".join(line.rstrip() for line in statement.splitlines())
    return f'r"""{lines}"""'


_PRINTERS: dict[Tool, Callable[[sql.Dialect, list[sql.Migration]], str]] = {
    "psql": _for_psql,
    "alembic": _for_alembic,
    "django": _for_django,
}
