"""The server to measure on, and what a reader must know about the machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

import psycopg
from psycopg import sql as psql

from benchmarks.parts.statements import TABLES
from taptwice.sql import migrations

PACKAGES = ("psycopg", "asyncpg", "sqlalchemy", "fastapi", "starlette", "uvicorn", "idemkit")


@contextlib.contextmanager
def database() -> Iterator[str]:
    """A database of this run alone, with our tables and those of the others."""
    server = os.environ["TAPTWICE_POSTGRES_URL"]
    name = f"taptwice_bench_{secrets.token_hex(4)}"
    quoted = psql.Identifier(name)
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(psql.SQL("CREATE DATABASE {}").format(quoted))
    url = urlsplit(server)._replace(path=f"/{name}").geturl()
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            for migration in migrations("postgresql"):
                for statement in migration.statements:
                    connection.execute(statement.encode())
            for table in TABLES["postgresql"]:
                connection.execute(table.encode())
        yield url
    finally:
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(psql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(quoted))


def settle(url: str) -> None:
    """Start a section with the last one's work written out."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CHECKPOINT")


def settings(url: str) -> dict[str, str]:
    names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
    with psycopg.connect(url, autocommit=True) as connection:
        rows = [connection.execute("SELECT current_setting(%s)", (name,)).fetchone() for name in names]
    return {name: str(row[0]) for name, row in zip(names, rows, strict=True) if row is not None}


def facts(url: str) -> list[str]:
    """The machine in a few lines, without its name."""
    server = settings(url)
    postgres = server.pop("server_version").split()[0]
    parser = "httptools" if _installed("httptools") else "h11"
    load = os.getloadavg()[0]
    busy = "; **the machine was busy with other work: these ratios are rough**" if load > 1 else ""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES if _installed(name))
    kernel = f"{platform.system()} {platform.release().partition('-')[0]}"  # without the builder's suffix
    return [
        f"{_processor()}, {os.cpu_count()} cores, {_memory()}, {kernel}",
        f"one write of 8 KiB and its fdatasync: {_sync_ms():.2f} ms (median)",
        f"PostgreSQL {postgres}: " + ", ".join(map(" ".join, server.items())),
        f"Python {sys.version.split()[0]}, {packages}",
        f"uvicorn with {parser} and asyncio's own loop, one worker",
        f"load average when the run began: {load:.1f}{busy}",
    ]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _sync_ms() -> float:
    sync = getattr(os, "fdatasync", os.fsync)
    with tempfile.TemporaryFile() as file:
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            os.write(file.fileno(), b"\0" * 8192)
            sync(file.fileno())
            times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000
