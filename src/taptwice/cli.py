"""The command line: make the tables, look at a record, remove old ones.

Exit codes: 0 done, 1 not found, 2 wrong usage or configuration, 3 the database cannot be used now,
130 stopped by Ctrl-C. Results go to stdout, everything else to stderr. A password in a URL is never printed.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import click

from taptwice import sql
from taptwice.cli_database import (
    Failed,
    NotFound,
    database_option,
    expected,
    harmless,
    json_option,
    open_database,
    print_json,
    time_text,
)
from taptwice.cli_intents import intents
from taptwice.conformance.cli import conformance
from taptwice.core.header import check_key, parse_key
from taptwice.core.model import pack_headers
from taptwice.errors import KeyInvalid, Misuse
from taptwice.flows.migrate import BOTH, migrate
from taptwice.flows.retention import partition_turn, sweep_turn
from taptwice.stores.sql import Inspected, Partition, SqlStore

Tool = Literal["psql", "alembic", "django"]

SEARCH_LIMIT = 100
"""How many records the statement `search` gives at most."""


phase_option = click.option(
    "--phase",
    type=click.Choice(BOTH),
    help="Only what runs before the new code is deployed (pre), or after the old code is gone (post).",
)

partition_option = click.option(
    "--partition-by",
    type=click.Choice(get_args(sql.Period)),
    help="Keep the records in a partition for each day on which they expire (PostgreSQL only).",
)


@click.group("taptwice", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="taptwice")
def main() -> None:
    """Idempotency keys: make their tables, look at a record, remove old ones.

    Exit codes: 0 done, 1 not found, 2 wrong usage or configuration, 3 the database cannot be used now.
    """


main.add_command(conformance)
main.add_command(intents)


@main.command()
@database_option
@phase_option
@partition_option
@json_option
def init(url: str, phase: sql.Phase | None, partition_by: sql.Period | None, as_json: bool) -> None:
    """Make the tables, or bring them up to this release.

    Applies what is missing, each migration in a transaction of its own. Running it again, or in several
    processes at once, is safe.

    \b
    Examples:
      taptwice init --database postgresql://app@db/shop
      TAPTWICE_DATABASE_URL=sqlite:///shop.db taptwice init
      taptwice init --phase pre       # before a deploy
      taptwice init --phase post      # when the old code is gone
      taptwice init --partition-by day    # also later: the records that are there are kept
    """
    database = open_database(url, create=True)
    with expected(database):
        steps = _steps(database.dialect, partition_by)
        done = database.drive(migrate(database.dialect, (phase,) if phase else BOTH, steps))
    if as_json:
        print_json({"applied": done.applied, "waiting": done.waiting})
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
@partition_option
def sql_(dialect: sql.Dialect, tool: Tool, phase: sql.Phase | None, partition_by: sql.Period | None) -> None:
    """Print the migrations as text, to paste. No database is touched.

    They are recorded as `taptwice init` does, which will find nothing to do afterwards.

    \b
    Examples:
      taptwice sql --dialect postgresql | psql shop
      taptwice sql --dialect postgresql --for alembic
      taptwice sql --dialect sqlite --for django
    """
    try:
        steps = [each for each in _steps(dialect, partition_by) if phase in (None, each.phase)]
    except Misuse as error:
        raise Failed(error.detail) from error
    click.echo(_PRINTERS[tool](dialect, steps), nl=False)


def _steps(dialect: sql.Dialect, partition_by: sql.Period | None) -> tuple[sql.Migration, ...]:
    optional = () if partition_by is None else (sql.partitioning(dialect, partition_by),)
    return (*sql.migrations(dialect), *optional)


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
      taptwice inspect '"order-7"'    # as it stands in the header
    """
    database = open_database(url)
    if account is None:
        click.echo("no --account: reading the whole table", err=True)
    with expected(database):
        found = database.read(SqlStore(database.dialect).inspect(_key(key), account))
    if not found:
        hint = (
            "look into all accounts by leaving --account out"
            if account is not None
            else "a table that keeps only hashes is searched with --account"
        )
        raise database.failure(NotFound, f"no record of this key ({hint})")
    if as_json:
        print_json([_as_json(each, body) for each in found])
    else:
        click.echo("\n\n".join(_as_text(each, body) for each in found))
    if len(found) == SEARCH_LIMIT:
        click.echo(f"these are the oldest {SEARCH_LIMIT}; there may be more", err=True)


def _key(text: str) -> str:
    """The key, also as it was copied from a header: there a quoted string is read without its quotes."""
    try:
        return check_key(parse_key([(b"Idempotency-Key", text.encode())]) if text.startswith('"') else text)
    except KeyInvalid:
        return check_key(text)  # a key of a JSON body may begin with a quote that does not end


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

    In a table that is partitioned by day, the days that are over are dropped, and partitions for the coming
    days are made: sweep once a day at least, as the role that owns the table.

    \b
    Examples:
      taptwice sweep
      taptwice sweep --batch 500 --max-batches 20 --json      # from cron
    """
    database = open_database(url)
    store = SqlStore(database.dialect)
    removed = batches = 0
    more = True
    partitions: tuple[Partition, ...] = ()
    try:
        with _progress() as tell, expected(database):
            while more and (max_batches is None or batches < max_batches):
                count = database.drive(sweep_turn(store, batch))
                removed, batches, more = removed + count, batches + 1, count == batch
                tell(f"{removed} removed in {batches} {'batch' if batches == 1 else 'batches'}")
            if not more:
                partitions = database.drive(partition_turn(store))
    finally:
        # Also when it was stopped: what is done is done.
        dropped, created = (
            [each.name for each in partitions if each.change == change] for change in ("dropped", "created")
        )
        if as_json:
            done = {"removed": removed, "batches": batches, "done": not more}
            print_json({**done, "partitions_dropped": dropped, "partitions_created": created})
        elif batches:
            click.echo(f"removed {removed} expired records{'; there may be more' if more else ''}")
            for change, names in (("dropped", dropped), ("created", created)):
                if names:
                    plural = "s" if len(names) > 1 else ""
                    click.echo(f"{change} {len(names)} partition{plural}: {', '.join(names)}")


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
        "created_at": time_text(record.created_at),
        "expires_at": time_text(found.expires_at),
        "header_names": [name for name, _ in answer.headers],
        "headers_bytes": len(pack_headers(answer.headers)),
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
        "created": time_text(record.created_at),
        "expires": time_text(found.expires_at),
        "headers": f"{names} ({len(pack_headers(answer.headers))} bytes)",
        "body": size,
    }
    shown = [f"{name:<11}  {harmless(value)}" for name, value in lines.items()]
    if body:
        shown += ["", *(harmless(f"{name}: {value}") for name, value in answer.headers)]
        shown += ["", *map(harmless, (answer.body or b"").decode(errors="backslashreplace").splitlines())]
    return "\n".join(shown)


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
