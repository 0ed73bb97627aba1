"""``taptwice intents``: what a client has under way, for whoever has to find out what became of it."""

from __future__ import annotations

from typing import Any

import click

from taptwice.cli_database import (
    Database,
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
from taptwice.client.intents import alone, dropped, renewed
from taptwice.stores.intents import Intent, SqlIntents


@click.group("intents")
def intents() -> None:
    """What a client means to have done elsewhere: list it, show it, give it up, give it a new key.

    \b
    made      written down, not sent
    sent      it may have been done, or not: send it again under its name, or find out at the server
    done      answered
    dropped   given up, and not sent again

    \b
    Examples:
      taptwice intents list
      taptwice intents show order-17
      taptwice intents drop order-17
      taptwice intents renew order-17
    """


@intents.command("list")
@database_option
@click.option("--all", "everything", is_flag=True, help="Those done and dropped too, the newest first.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True)
@json_option
def list_(url: str, everything: bool, limit: int, as_json: bool) -> None:
    """List the intents that have no answer, the oldest first.

    \b
    Examples:
      taptwice intents list --database sqlite:///intents.db
      taptwice intents list --all --limit 1000 --json | jq '.[] | select(.status >= 400)'
    """
    database = open_database(url)
    table = SqlIntents(database.dialect)
    with expected(database):
        found = database.read(table.list(open_only=not everything, limit=limit))
    if as_json:
        print_json([_as_json(each, body=False) for each in found])
    else:
        width = max((len(harmless(each.name)) for each in found), default=0)
        for each in found:
            status = "" if each.answer is None else f"  {each.answer.status}"
            line = f"{harmless(each.name):<{width}}  {each.state:<7}  {time_text(each.made_at)}{status}"
            click.echo(line)
    if len(found) == limit:
        click.echo(f"these are {limit}; there may be more", err=True)


@intents.command()
@click.argument("name")
@database_option
@click.option("--body", is_flag=True, help="Show the answer's body too.")
@json_option
def show(name: str, url: str, body: bool, as_json: bool) -> None:
    """Show all that is known of the intent NAME. The server knows it by its key.

    The body of an answer may be confidential, and is shown only with --body.

    \b
    Examples:
      taptwice intents show order-17
      taptwice intents show order-17 --json | jq -r .key
    """
    database = open_database(url)
    _print(_found(database, name), as_json, body)


@intents.command()
@click.argument("name")
@database_option
@json_option
def drop(name: str, url: str, as_json: bool) -> None:
    """Give the intent NAME up: no client sends it again.

    What was sent before may have been done all the same. An intent that is done stays done.

    \b
    Examples:
      taptwice intents drop order-17
      taptwice intents drop order-17 --json
    """
    database = open_database(url)
    table = SqlIntents(database.dialect)
    with expected(database):
        found = database.drive(alone(table, dropped(table, name)))
    _print(_there(database, name, found), as_json)


@intents.command()
@click.argument("name")
@database_option
@click.option("--yes", is_flag=True, help="Also if it may have been done under the key that it has.")
@json_option
def renew(name: str, url: str, yes: bool, as_json: bool) -> None:
    """Give the intent NAME a new key, so that it may be sent again, as any request.

    Under the new key it is done, whether it was done under the old one or not: find that out first. What
    has succeeded is never renewed.

    \b
    Examples:
      taptwice intents renew order-17             # never sent, or the server declined it
      taptwice intents renew order-17 --yes       # it was not done: the server's own books say so
    """
    database = open_database(url)
    before = _found(database, name)
    if before.sent_at is not None and before.done_at is None and not yes:
        raise database.failure(
            Failed,
            f"intent {name!r} was sent at {time_text(before.sent_at)} and may have been done; find out at the"
            f" server (its key there: {before.key}), and say --yes if it was not",
        )
    table = SqlIntents(database.dialect)
    with expected(database):
        found = database.drive(alone(table, renewed(table, name)))
    _print(_there(database, name, found), as_json)


def _found(database: Database, name: str) -> Intent:
    with expected(database):
        return _there(database, name, database.read(SqlIntents(database.dialect).look(name)))


def _there(database: Database, name: str, found: Intent | None) -> Intent:
    if found is None:
        raise database.failure(
            NotFound, f"no intent {name!r}; `taptwice intents list --all` shows what there is"
        )
    return found


# --- printing -----------------------------------------------------------------------------------------------


def _print(found: Intent, as_json: bool, body: bool = False) -> None:
    if as_json:
        print_json(_as_json(found, body))
    else:
        click.echo(_as_text(found, body))


def _time(moment: float | None) -> str | None:
    return None if moment is None else time_text(moment)


def _as_json(found: Intent, body: bool) -> dict[str, Any]:
    answer = found.answer
    shown: dict[str, Any] = {
        "name": found.name,
        "state": found.state,
        "key": found.key,
        "fingerprint": None if found.fingerprint is None else found.fingerprint.hex(),
        "made_at": _time(found.made_at),
        "sent_at": _time(found.sent_at),
        "done_at": _time(found.done_at),
        "dropped_at": _time(found.dropped_at),
        "status": None if answer is None else answer.status,
        "body_bytes": None if answer is None or answer.body is None else len(answer.body),
    }
    if body:
        kept = None if answer is None else answer.body
        shown["body"] = None if kept is None else kept.decode(errors="backslashreplace")
    return shown


def _as_text(found: Intent, body: bool) -> str:
    shown = _as_json(found, body=False)
    size = shown.pop("body_bytes")
    if found.answer is not None:
        shown["body"] = "not kept" if size is None else f"{size} bytes"
    lines = [
        f"{name.removesuffix('_at'):<11}  {harmless(str(value))}" for name, value in shown.items() if value
    ]
    if body and found.answer is not None and found.answer.body is not None:
        text = found.answer.body.decode(errors="backslashreplace")
        lines += ["", *map(harmless, text.splitlines())]
    return "\n".join(lines)
