"""A client in a process of its own, which is killed: one call, described on its standard input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taptwice.conformance.clients.doors import Asked, Door
from taptwice.conformance.clients.setup import Setup, Time
from taptwice.conformance.clients.subject import Subject


def waiting() -> subprocess.Popen[bytes]:
    """A process that does nothing until it is told."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def tell(
    process: subprocess.Popen[bytes],
    door: str,
    given: Mapping[str, Any],
    time: Time,
    url: str,
    folder: Path,
    asked: Asked,
) -> bytes:
    """Let it make its call; what it says on its standard error, when it has ended."""
    told = {
        "door": door,
        "given": dict(given),
        "time": [time.pace, time.seed, time.waiting],
        "url": url,
        "folder": str(folder),
        "asked": [asked.method, asked.path, asked.body and asked.body.decode(), asked.intent],
    }
    return process.communicate(json.dumps(told).encode())[1]


def main() -> None:
    """Make the call."""
    from taptwice.conformance.clients.broken import door_of

    told = json.load(sys.stdin)
    door: Door = door_of(told["door"])
    pace, seed, waiting = told["time"]
    method, path, body, intent = told["asked"]
    subject = Subject(
        door,
        Setup(told["given"]),
        Time(pace, seed, waiting),
        told["url"],
        Path(told["folder"]),
        lambda event: None,
    )
    _ = subject.call(Asked(method, path, body and body.encode(), intent))
    subject.close()


if __name__ == "__main__":
    main()
