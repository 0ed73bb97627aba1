"""The clients, in a process of their own: `python -m benchmarks.parts.load`.

A job comes in as a line of JSON and its outcome goes out as one. Raw sockets, kept alive: whatever the
clients cost is taken from the service, on a machine of few cores.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
MARKER = b"\r\nidempotent-replayed: true"


@dataclass(frozen=True, slots=True)
class Job:
    """`requests` each client, or `seconds`. `keys` above zero: each client goes round that many keys."""

    port: int
    method: str
    path: str
    body: str
    run: str
    clients: int
    seconds: float = 0.0
    requests: int = 0
    keys: int = 0


@dataclass(slots=True)
class Tally:
    done: int = 0
    replayed: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    ended: float = 0.0


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, job: Job, number: int, tally: Tally, stop: float, over: asyncio.Future[None]) -> None:
        self._job = job
        self._tally = tally
        self._stop = stop
        self._over = over
        self._number = 0
        self._buffer = b""
        body = job.body.encode()
        entity = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) if body else b""
        self._head = (
            f"{job.method} {job.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer acct_42\r\n"
            f"Idempotency-Key: {job.run}-{number:04d}-"
        ).encode()
        self._tail = b"\r\n" + entity + b"\r\n" + body

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        number = self._number % self._job.keys if self._job.keys else self._number
        self._number += 1
        self._transport.write(b"%b%014d%b" % (self._head, number, self._tail))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = buffer[: end + 2]
        length = _LENGTH.search(head)
        if length is None or len(buffer) < end + 4 + int(length[1]):
            return
        self._buffer = b""
        tally = self._tally
        tally.done += 1
        tally.replayed += MARKER in head
        status = head[9:12].decode()
        tally.statuses[status] = tally.statuses.get(status, 0) + 1
        now = tally.ended = time.perf_counter()
        if now < self._stop if not self._job.requests else self._number < self._job.requests:
            self._send()
        else:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.done():
            self._over.set_exception(error or ConnectionError("the service closed the connection"))

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
        self._transport.close()


async def carry_out(job: Job) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    tally = Tally()
    begun = time.perf_counter()
    waiting = []
    for number in range(job.clients):
        over = loop.create_future()
        waiting.append(over)
        await loop.create_connection(
            lambda number=number, over=over: Client(job, number, tally, begun + job.seconds, over),  # type: ignore[misc]
            "127.0.0.1",
            job.port,
        )
    await asyncio.wait_for(asyncio.gather(*waiting), job.seconds + 60)
    return {
        "rate": tally.done / (tally.ended - begun),
        "done": tally.done,
        "replayed": tally.replayed,
        "statuses": tally.statuses,
    }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(carry_out(Job(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
