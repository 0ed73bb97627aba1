"""Fixtures with PostgreSQL behind them, and PgBouncer.

`./dev test` finds or starts one server for the whole run and names it in TAPTWICE_POSTGRES_URL. On that
server these fixtures touch only databases that they made. A test that stops or kills a server takes
`own_postgres`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

import services
from services import PrivatePgBouncer, PrivatePostgres


def pytest_report_header() -> str:
    if "postgres" in _skipped():
        return "PostgreSQL: skipped by --skip postgres"
    url = os.environ.get(services.VARIABLE)
    if not url:
        return f"PostgreSQL: none, {services.VARIABLE} is not set"
    origin = os.environ.get(services.DESCRIPTION, f"from {services.VARIABLE}")
    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            row = connection.execute("show server_version").fetchone()
    except psycopg.Error as error:
        return f"PostgreSQL: not reachable: {error}"
    return f"PostgreSQL: {row[0] if row else '?'} ({origin})"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A database of this run, one for each xdist worker. It is shared between tests."""
    with _new_database(_server()) as url:
        yield url


@pytest.fixture
def fresh_postgres() -> Iterator[str]:
    """An empty database of this test alone."""
    with _new_database(_server()) as url:
        yield url


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PrivatePostgres]:
    """A running server of this module alone, to be stopped, killed and restarted at will.

    A test that needs it up begins with `own_postgres.start()`, which does nothing when it runs.
    """
    if "postgres" in _skipped():
        pytest.skip("skipped by --skip postgres")
    if services.postgres_binaries() is None:
        _missing("no PostgreSQL binaries for a server of its own")
    with PrivatePostgres() as server:
        yield server


@pytest.fixture(scope="session")
def _pgbouncer() -> Iterator[PrivatePgBouncer]:
    if "pgbouncer" in _skipped():
        pytest.skip("skipped by --skip pgbouncer")
    server = _server()
    if services.pgbouncer_binary() is None:
        _missing("no pgbouncer")
    with PrivatePgBouncer(server) as bouncer:
        yield bouncer


@pytest.fixture
def pgbouncer_url(fresh_postgres: str, _pgbouncer: PrivatePgBouncer) -> str:
    """The database of `fresh_postgres`, reached through PgBouncer in transaction mode."""
    return _pgbouncer.url_for(urlsplit(fresh_postgres).path.lstrip("/"))


def _skipped() -> list[str]:
    return os.environ.get(services.SKIPPED, "").split(",")


def _server() -> str:
    """The server found for this run. None found, and not skipped on purpose, is a failure, never a skip."""
    if "postgres" in _skipped():
        pytest.skip("skipped by --skip postgres")
    url = os.environ.get(services.VARIABLE)
    if not url:
        pytest.fail(
            f"{services.VARIABLE} is not set. Run the tests with `./dev test [pytest arguments]`, which finds"
            " or starts a server, or leave it out with `./dev test --skip postgres`.",
            pytrace=False,
        )
    if urlsplit(url).scheme not in ("postgresql", "postgres"):
        pytest.fail(f"{services.VARIABLE} must be a URL postgresql://user@host:port/database", pytrace=False)
    return url


def _missing(what: str) -> None:
    """Where CI runs, everything must be there; elsewhere a missing program skips its tests."""
    message = f"{what}. On Debian: {services.APT_LINE}"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def _new_database(server: str) -> Iterator[str]:
    name = f"taptwice_test_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as admin:
        # From template0: nobody can be connected to it, which would make this fail.
        admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
