"""What a key costs on disk beyond its answer's body, and what the import costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import psycopg

from benchmarks.parts.measure import Result
from benchmarks.parts.statements import ACCOUNT, REQUEST_BYTES, Keys, body_of
from taptwice.flows.guard import Guard

CASES = (
    ("only hashes, no headers", Guard(in_clear=False), (), 150),
    (
        "account and key in the clear, content-type and location",
        Guard(),
        (("content-type", "application/json"), ("location", "/charges/1234567")),
        270,
    ),
)


def bytes_a_key(url: str, number: int) -> list[Result]:
    """The growth of table, indexes and TOAST, less the bodies, over the keys."""
    results = []
    with psycopg.connect(url, autocommit=True) as connection:
        for what, guard, headers, goal in CASES:
            connection.execute("TRUNCATE taptwice_records")
            before = _size(connection)
            keys, bodies = Keys(), 0
            for start in range(0, number, 500):
                with connection.transaction():
                    for at in range(start, min(start + 500, number)):
                        body = body_of(1_000_000 + at)
                        bodies += len(body)
                        with guard.claim(
                            connection, account=ACCOUNT, key=keys(), request=REQUEST_BYTES
                        ) as claim:
                            claim.finish(201, body, headers)
            connection.execute("VACUUM taptwice_records")
            each = (_size(connection) - before - bodies) / number
            results.append(Result("size", f"bytes a key, {what}", f"≤ {goal}", f"{each:.0f}", each <= goal))
        connection.execute("TRUNCATE taptwice_records")
    return results


def _size(connection: psycopg.Connection[tuple[int]]) -> int:
    row = connection.execute("SELECT pg_total_relation_size('taptwice_records')").fetchone()
    assert row is not None
    return row[0]


def import_ms(runs: int) -> list[Result]:
    """`import taptwice` over a Python that imports nothing, run in turn."""
    times: dict[str, list[float]] = {"pass": [], "import taptwice": []}
    for _ in range(runs):
        for code, found in times.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            found.append((time.perf_counter() - begun) * 1000)
    bare, ours = (statistics.median(found) for found in times.values())
    return [
        Result(
            "import", "import taptwice, ms over bare Python", "≤ 30", f"{ours - bare:.0f}", ours - bare <= 30
        )
    ]
