"""``taptwice conformance``: run the wire cases, explain one, check the runner itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from taptwice.errors import TaptwiceError

if TYPE_CHECKING:  # imported when a command runs: they bring a server and its libraries
    from taptwice.conformance.judge import Observed
    from taptwice.conformance.language import Case
    from taptwice.conformance.run import Result, Runner


class Refused(click.ClickException):
    """Wrong usage: one line on stderr, and an exit code that no failed case has."""

    exit_code = 2


VARIABLE = "TAPTWICE_POSTGRES_URL"
FILE = click.Path(exists=True, dir_okay=False)
_DOORS = "httpx2, httpx (both also with -transport, -async), requests, aiohttp"


@click.group("conformance")
def conformance() -> None:
    """Prove an idempotent server over its sockets.

    \b
    Examples:
      taptwice conformance run
      taptwice conformance run --store postgresql --driver asyncpg --json report.json
      taptwice conformance run --url https://api.example/v1 --map routes.json --as acct_a='Authorization: …'
      taptwice conformance explain D-098
      taptwice conformance selfcheck

    Exit codes: 0 good, 1 a case failed, 2 wrong usage, something missing, or nothing that could be run.
    """


def _cases(path: str | None) -> tuple[Case, ...]:
    from taptwice.conformance import language

    try:
        return language.own_cases() if path is None else language.cases_of(path)
    except TaptwiceError as error:
        raise Refused(error.detail) from error


@conformance.command("run")
@click.option("--app", help="Reference application: fastapi (default), starlette, flask.")
@click.option("--store", type=click.Choice(["sqlite", "postgresql"]), help="Default: sqlite.")
@click.option("--driver", help="Default: the application's usual one.")
@click.option(
    "--server",
    envvar=VARIABLE,
    help=f"PostgreSQL on which a database may be made; or {VARIABLE}. Default: one is started.",
)
@click.option("--url", help="Somebody else's server instead, by its address.")
@click.option("--map", "map_", type=FILE, help="Its routes: see docs/conformance.md.")
@click.option(
    "--as", "callers", multiple=True, metavar="CALLER='HEADER: VALUE'", help="How a caller logs in."
)
@click.option("--yes", is_flag=True, help="Do not ask before writing to it.")
@click.option("--client", default="httpx2", show_default=True, help=f"For cases about clients: {_DOORS}.")
@click.option("--cases", "path", type=FILE, help="Other cases.")
@click.option("--only", multiple=True, metavar="ID", help="Only this case; may be repeated.")
@click.option("--json", "report", type=click.Path(dir_okay=False), help="Write the report here.")
def run_(
    app: str | None,
    store: str | None,
    driver: str | None,
    server: str | None,
    url: str | None,
    map_: str | None,
    callers: tuple[str, ...],
    yes: bool,
    client: str,
    path: str | None,
    only: tuple[str, ...],
    report: str | None,
) -> None:
    """Run the cases against the reference application, or a server. Exit code 1 when one fails."""
    from taptwice.conformance.report import as_json, summary
    from taptwice.conformance.stack import default_driver

    cases = _chosen(_cases(path), only)
    if (url is None) != (map_ is None) or (url is None and callers):
        raise click.UsageError("--url, --map and --as belong together")
    if url is not None and (app or store or driver):
        raise click.UsageError(
            "--app, --store and --driver are for the reference applications, not for --url"
        )
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise Refused(f"--json {report}: there is no such folder")
    try:
        if url is not None and map_ is not None:
            results = asyncio.run(_run_foreign(cases, url, Path(map_).read_text("utf-8"), callers, yes))
            title = url
        else:
            app, store = app or "fastapi", store or "sqlite"
            driver = driver or default_driver(app, store)
            results = asyncio.run(_run(cases, app, store, driver, server or "", client))
            title = f"{app} on {store} through {driver}; client {client}"
    except TaptwiceError as error:
        raise Refused(error.detail) from error
    if report is not None:
        Path(report).write_text(as_json(results), "utf-8")
    click.echo(f"\n{title}\n{summary(results)}")
    if any(result.status == "failed" for result in results):
        raise SystemExit(1)
    if all(result.status == "skipped" for result in results):
        raise Refused("every case was skipped: nothing is proven; the reasons are above")


def _chosen(cases: tuple[Case, ...], only: tuple[str, ...]) -> list[Case]:
    """The cases of these names, whose case does not matter; all of them without any."""
    wanted = {name.lower() for name in only}
    if missing := wanted - {case.id.lower() for case in cases}:
        raise Refused(f"no case {', '.join(sorted(name for name in only if name.lower() in missing))}")
    return [case for case in cases if not only or case.id.lower() in wanted]


async def _run(
    cases: list[Case], app: str, store: str, driver: str, server: str, client: str
) -> list[Result]:
    from taptwice.conformance.clients.play import Clients
    from taptwice.conformance.clients.words import for_clients
    from taptwice.conformance.needed import check_client, check_server
    from taptwice.conformance.reference import Reference
    from taptwice.conformance.run import Runner

    clients = Clients(client)
    target = Reference(app, store, driver, server)
    if any(map(for_clients, cases)):
        check_client(client)
    if all(map(for_clients, cases)):  # these need no server, and no libraries of one
        return await _played(Runner(target, clients), cases)
    check_server(app, store, driver)
    async with target:
        await target.begin()
        return await _played(Runner(target, clients), cases)


async def _played(runner: Runner, cases: list[Case]) -> list[Result]:
    from taptwice.conformance.progress import progress
    from taptwice.conformance.report import line_of

    results = []
    with progress(len(cases), "cases") as step:
        for case in cases:
            results.append(await runner.run(case))
            step(line_of(results[-1]))
    return results


async def _run_foreign(
    cases: list[Case], url: str, text: str, callers: tuple[str, ...], yes: bool
) -> list[Result]:
    from taptwice.conformance.foreign import Foreign, writes
    from taptwice.conformance.maps import read
    from taptwice.conformance.run import Runner

    async with Foreign(url, read(text, cases), callers, cases) as target:
        left = [case for case in cases if not case.strange and not list(target.not_offered(case))]
        click.echo(f"{len(left)} of {len(cases)} cases can be run; they send {writes(left)} writes to {url}")
        if target.commands:
            click.echo(f"its control interface offers {', '.join(sorted(target.commands))}")
        if not yes and not click.confirm("Go on?"):
            raise click.Abort
        return await _played(Runner(target), cases)


@conformance.command()
@click.option("--app", default="fastapi", show_default=True, help="fastapi, starlette or flask.")
@click.option("--store", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", show_default=True)
@click.option("--driver", help="Default: the application's usual one.")
@click.option("--server", envvar=VARIABLE, help=f"As for `run`; or {VARIABLE}.")
@click.option("--port", default=8000, show_default=True)
def serve(app: str, store: str, driver: str | None, server: str | None, port: int) -> None:
    """Serve a reference application, with its control interface, until it is interrupted."""
    from taptwice.conformance.stack import default_driver

    try:
        asyncio.run(_serve(app, store, driver or default_driver(app, store), server or "", port))
    except TaptwiceError as error:
        raise Refused(error.detail) from error


async def _serve(app: str, store: str, driver: str, server: str, port: int) -> None:
    from taptwice.conformance.needed import check_server
    from taptwice.conformance.reference import Reference

    served = Reference(app, store, driver, server, port)
    check_server(app, store, driver)
    async with served as target:
        address = await target.served()
        click.echo(f"{app} on {store} through {driver}: http://{address[0]}:{address[1]}")
        ended = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, ended.set)
        await ended.wait()


@conformance.command()
@click.option("--server", envvar=VARIABLE, help=f"As for `run`; or {VARIABLE}.")
@click.option("--save", type=click.Path(dir_okay=False), help="Write the matrix here, as Markdown.")
def matrix(server: str | None, save: str | None) -> None:
    """Run every case on every application, store and driver, or client. Exit code 1 when one fails."""
    from taptwice.conformance.clients.doors import DOORS
    from taptwice.conformance.clients.words import for_clients
    from taptwice.conformance.matrix import as_markdown, cells
    from taptwice.conformance.progress import progress

    found: dict[tuple[str, str, str], list[Result]] = {}
    clients: dict[str, list[Result]] = {}
    cases = [case for case in _cases(None) if not for_clients(case)]
    with progress(len(cells()) + len(DOORS), "cells") as step:
        for cell in cells():
            found[cell] = asyncio.run(_quietly(cases, *cell, server or ""))
            step(_cell(" · ".join(cell), found[cell]))
        for client in DOORS:
            clients[client] = asyncio.run(_of_clients(_cases(None), client))
            step(_cell(client, clients[client]))
    if save is not None:
        Path(save).write_text(as_markdown(found, clients), "utf-8")
    everything = (*found.values(), *clients.values())
    if any(result.status == "failed" for results in everything for result in results):
        raise SystemExit(1)


def _cell(name: str, results: Iterable[Result]) -> str:
    failed = [each.case.id for each in results if each.status == "failed"]
    return f"{name}: {', '.join(failed) + ' failed' if failed else 'good'}"


async def _quietly(cases: Iterable[Case], app: str, store: str, driver: str, server: str) -> list[Result]:
    from taptwice.conformance.reference import Reference
    from taptwice.conformance.run import Runner

    async with Reference(app, store, driver, server) as target:
        runner = Runner(target)
        return [await runner.run(case) for case in cases]


@conformance.command()
@click.argument("name", metavar="CASE")
@click.option("--cases", "path", type=FILE, help="Other cases.")
def explain(name: str, path: str | None) -> None:
    """The rule of a case, its source, and the exchange that is expected."""
    from taptwice.conformance.report import explained

    found, *_ = _chosen(_cases(path), (name,))
    click.echo(explained(found))


@conformance.command()
@click.option(
    "--record", is_flag=True, help="First record the exchanges anew, from the reference application."
)
@click.option(
    "--servers/--no-servers", default=True, help="Also run the deliberately broken servers and clients."
)
def selfcheck(record: bool, servers: bool) -> None:
    """Would the runner notice? Exit code 1 when it would not.

    Each expectation of each case is altered and judged on a recorded exchange: at least 99 % must be noticed.
    Then each deliberately broken server and client must fail the case that is made for it, and pass an
    ordinary one.
    """
    from taptwice.conformance import alter

    if record:
        folder = Path(__file__).parent
        (folder / alter.RECORDED).write_bytes(alter.packed(asyncio.run(_recorded())))
        (folder / alter.CLIENTS_RECORDED).write_bytes(alter.packed(asyncio.run(_clients_recorded())))
    found = alter.noticed(_cases(None), alter.recordings())
    missed = [each for each in found if not each.noticed]
    for each in missed:
        click.echo(f"{each.case:<7} not noticed: {each.what}{alter.WHY.get(each.what, '')}")
    click.echo(f"{len(found) - len(missed)} of {len(found)} alterations noticed")
    good = len(missed) * 100 <= len(found)
    if servers:
        good = asyncio.run(_controls()) and good
        good = asyncio.run(_client_controls()) and good
    if not good:
        raise SystemExit(1)


async def _recorded() -> dict[str, Observed]:
    from taptwice.conformance.reference import Reference
    from taptwice.conformance.run import Runner

    async with Reference("fastapi", "sqlite", "aiosqlite") as target:
        runner = Runner(target)
        results = [await runner.run(case) for case in _cases(None)]
    return {result.case.id: result.seen for result in results if result.seen is not None}


ORDINARY = "D-056"
"""A case that the broken servers pass: they are broken in one thing only."""


async def _controls() -> bool:
    from taptwice.conformance.apps.broken import CONTROLS
    from taptwice.conformance.reference import Reference
    from taptwice.conformance.run import Runner

    cases = {case.id: case for case in _cases(None)}
    good = True
    for damage, name in CONTROLS.items():
        async with Reference(f"broken:{damage}", "sqlite", "aiosqlite") as target:
            runner = Runner(target)
            ordinary, own = await runner.run(cases[ORDINARY]), await runner.run(cases[name])
        noticed = own.status == "failed" and ordinary.status == "passed"
        good = good and noticed
        click.echo(
            f"broken server {damage:<22} {'caught' if noticed else 'NOT CAUGHT'} by {name}: {own.reason}"
        )
    return good


ORDINARY_CLIENT = "D-289"
"""As `ORDINARY`, of the broken clients."""


async def _client_controls() -> bool:
    from taptwice.conformance.clients.broken import BROKEN, CONTROLS

    cases = {case.id: case for case in _cases(None)}
    good = True
    for damage, name in CONTROLS.items():
        ordinary, own = await _of_clients([cases[ORDINARY_CLIENT], cases[name]], BROKEN + damage)
        noticed = own.status == "failed" and ordinary.status == "passed"
        good = good and noticed
        click.echo(
            f"broken client {damage:<22} {'caught' if noticed else 'NOT CAUGHT'} by {name}: {own.reason}"
        )
    return good


async def _clients_recorded() -> dict[str, Observed]:
    results = await _of_clients(_cases(None), "httpx2")
    return {result.case.id: result.seen for result in results if result.seen is not None}


async def _of_clients(cases: Iterable[Case], client: str) -> list[Result]:
    from taptwice.conformance.clients.play import Clients
    from taptwice.conformance.clients.words import for_clients

    clients = Clients(client)
    return [await clients.run(case) for case in cases if for_clients(case)]
