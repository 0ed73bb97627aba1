"""gunicorn, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def gunicorn(
    target: str, workers: int = 2, threads: int = 4, **environment: str
) -> Iterator[tuple[str, int]]:
    """Serve an application at the address that is given. Requests are taken from the first moment on."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        options = (
            f"-k gthread -w {workers} --threads {threads} -b fd://{listener.fileno()} --log-level warning"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *options.split(), "--no-control-socket", target],
            cwd=ROOT,
            env={**os.environ, **environment},
            pass_fds=[listener.fileno()],
        )
        try:
            yield listener.getsockname()
        finally:
            process.terminate()
            process.wait(20)
