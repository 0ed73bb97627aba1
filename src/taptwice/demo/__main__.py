"""``python -m taptwice.demo``: arguments, exit codes, and an orderly end.

Exit codes: 0 everything came as it is told, 1 something did not, 2 wrong usage, 3 it could not be played,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what comes with the extra is imported only once it is known to be there
    from taptwice.demo.databases import Database
    from taptwice.demo.play import Play
    from taptwice.demo.show import Printed
    from taptwice.demo.stage import Stage

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 130
LIMIT_S = 60
"""For the whole play. It takes about two seconds."""

ABOUT = """\
Start a payments service, pay over real HTTP, lose replies and tap again: charged
twice without an idempotency key, once with it. It plays on a temporary SQLite file
unless told otherwise; whatever it makes is removed at the end."""

EXAMPLES = """\
examples:
  ./dev demo
  ./dev demo --serve
  ./dev demo --json | python3 -m json.tool
  ./dev demo --database postgresql://user@localhost/shop
  python -m taptwice.demo      # the same, where 'taptwice[demo]' is installed
"""


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        help="play on this PostgreSQL, in a new schema that is dropped at the end; nothing else is touched",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--serve", action="store_true", help="leave the service up, with curl lines to try")
    output.add_argument("--json", action="store_true", help="print what was seen as data")
    return parser.parse_args(given)


def missing(database: str | None) -> str | None:
    """What to install, if anything is."""
    wanted = ("aiosqlite", "fastapi", "greenlet", "httpx2", "sqlalchemy", "uvicorn")
    lacking = [module for module in wanted if importlib.util.find_spec(module) is None]
    extras = ["demo"] if lacking else []
    if database is not None:
        try:
            import psycopg  # noqa: F401 - it may be there and still not find its library
        except ImportError:
            lacking.append("psycopg")
            extras.append("postgres")
    if not lacking:
        return None
    return f"not installed: {', '.join(lacking)}. They come with: pip install 'taptwice[{','.join(extras)}]'"


async def perform(database: Database, options: argparse.Namespace) -> int:
    from taptwice.demo.play import Director, Show
    from taptwice.demo.show import Printed
    from taptwice.demo.stage import staged

    begun = time.monotonic()
    printed = None if options.json else Printed()
    async with staged(database) as stage:
        if printed:
            printed.say(f"The service is up at {stage.address}, on {database.product}:")
            printed.say(f"{database.where}. It plays there alone and leaves nothing behind.")
        async with asyncio.timeout(LIMIT_S):
            plays = await Director(stage, printed or Show()).all()
        faults = [fault for play in plays for fault in play.faults]
        if printed:
            printed.say()
            if not faults:
                printed.say(f"All as told. {time.monotonic() - begun:.1f} s.")
            if options.serve:
                await serve(stage, printed)
        else:
            print(json.dumps(as_data(database, plays), indent=2))
    for fault in faults:
        print(f"demo: not as told: {fault}", file=sys.stderr)
    return FAILED if faults else 0


def as_data(database: Database, plays: list[Play]) -> dict[str, object]:
    return {
        "database": {"product": database.product, "where": database.where},
        "plays": [play.as_data() for play in plays],
        "as_told": not any(play.faults for play in plays),
    }


async def serve(stage: Stage, printed: Printed) -> None:
    """Leave the service up until Ctrl-C, with an empty table."""
    from taptwice.demo.databases import DemoError

    stage.database.empty()
    position = len(stage.server.events)
    printed.say("The service stays up, its table empty. To try, in another terminal:\n")
    for what, line in curl_lines(stage.address):
        printed.say(f"  {printed.paint(f'# {what}', '2')}\n  {line}\n")
    printed.say("Ctrl-C ends it.\n")
    try:
        while (event := await stage.server.next(position)) is not None:
            printed.event(event)
            position += 1
        raise DemoError("the server ended by itself")
    except asyncio.CancelledError:
        # Ctrl-C is how this is meant to end, so it is no failure.
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()


def curl_lines(address: str) -> list[tuple[str, str]]:
    from taptwice.demo.stage import ACCOUNT

    login = f"-H 'Authorization: Bearer {ACCOUNT}'"
    key = "-H 'Idempotency-Key: 8e03978e-40d5-43e8-bc93-6894a57f9324'"
    json_header = "-H 'Content-Type: application/json'"
    url = f"{address}/v1/payments"

    def pay(amount: int, *headers: str) -> str:
        body = json.dumps({"amount_cents": amount, "currency": "eur"}, separators=(",", ":"))
        return " ".join(["curl -i", url, login, *headers, json_header, f"-d '{body}'"])

    return [
        ("pay; do it twice, and look for Idempotent-Replayed", pay(5000, key)),
        ("the same key for another amount: 422", pay(6000, key)),
        ("no key: 400", pay(5000)),
        ("what was charged", f"curl -i {url} {login}"),
    ]


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if lacking := missing(options.database):
        print(f"demo: {lacking}", file=sys.stderr)
        return USAGE
    from taptwice.demo.databases import DemoError, opened

    # Whoever ends us politely gets the same orderly end as by Ctrl-C. A shell that starts us in the
    # background has SIGINT ignored, and asyncio would leave it at that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for polite in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(polite) is not signal.SIG_IGN:  # nohup
            signal.signal(polite, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with opened(options.database) as database:
            code = asyncio.run(perform(database, options))
        if options.serve:
            print("\nThe service is down, and everything it made is removed.")
        return code
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.code
    except TimeoutError:
        print("demo: it took too long and was given up; everything is removed", file=sys.stderr)
        return UNAVAILABLE
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(f"demo: {error}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        print("\ndemo: stopped; everything is removed", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
