"""The cases of the package, on real processes: FastAPI on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taptwice.conformance.language import own_cases
from taptwice.conformance.reference import Reference
from taptwice.conformance.run import Result, Runner

NOT_BUILT = {
    *("D-264", "D-266"),  # nested
    *("D-269", "D-270", "D-272", "D-274", "D-276"),  # inbox
}


async def run_all(
    store: str, driver: str, server: str = "", app: str = "fastapi", core: bool = False
) -> list[Result]:
    async with Reference(app, store, driver, server) as target:
        runner = Runner(target)
        return [await runner.run(case) for case in own_cases() if case.level == "core" or not core]


def check(results: list[Result], only_elsewhere: set[str], least: int = 166) -> None:
    failed = [f"{result.case.id}: {result.reason}" for result in results if result.status == "failed"]
    assert not failed, "\n".join(failed)
    core = [each.case for each in results if each.status == "skipped" and each.case.level == "core"]
    skipped = {case.id for case in core if case.sut == "server" and "tx" in case.modes}
    assert skipped == NOT_BUILT | only_elsewhere
    assert sum(result.status == "passed" for result in results) >= least


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sqlite_aiosqlite() -> None:
    check(asyncio.run(run_all("sqlite", "aiosqlite")), {"D-179"})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("app", "driver"), [("starlette", "aiosqlite"), ("flask", "sqlite3")])
def test_other_frameworks(app: str, driver: str) -> None:
    check(asyncio.run(run_all("sqlite", driver, app=app, core=True)), {"D-179"}, least=124)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_postgresql_asyncpg(postgres_url: Any) -> None:
    check(asyncio.run(run_all("postgresql", "asyncpg", postgres_url)), {"D-178"})
