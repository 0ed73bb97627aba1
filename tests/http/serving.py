"""Servers in processes of their own, on a socket that was opened for them: no port is free for a moment."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn

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


def started(module: str, *arguments: str) -> tuple[int, subprocess.Popen[str]]:
    """A program that calls `serve`, and the port where its requests are taken from the first moment on."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(listener.fileno()), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listener.fileno()],
        )
        return listener.getsockname()[1], process


def serve(app: Any, listener: str, **options: Any) -> None:
    """Serve with uvicorn, in such a program, on the socket whose number it was given."""
    with socket.socket(fileno=int(listener)) as given:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", **options)).run(sockets=[given])
