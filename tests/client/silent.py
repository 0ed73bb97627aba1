"""An address that drops all packets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def silent(host: str, port: int) -> Iterator[int]:
    """Nobody who connects there hears anything: the queue of its listener is full. Gives the port."""
    with socket.socket() as full, socket.socket() as one, socket.socket() as other:
        full.bind((host, port))
        full.listen(0)
        for each in (one, other):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full.getsockname()[1]
