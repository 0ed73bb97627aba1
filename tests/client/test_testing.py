"""The scripted server itself."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from taptwice.client.testing import ScriptedServer, answer
from taptwice.errors import Misuse


def asked(server: ScriptedServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connection.recv(12)


@pytest.mark.parametrize("step", ["x", None, 99, 1000, True, 200.0])
def test_what_is_no_step_is_refused_before_anybody_asks(step: Any) -> None:
    with pytest.raises(Misuse, match="is no step"):
        ScriptedServer([200, step])
    if not callable(step):
        with pytest.raises(Misuse, match="is no step"):
            answer(step)


def test_an_empty_script() -> None:
    with pytest.raises(Misuse, match="one step at least"):
        ScriptedServer([])


def test_it_refuses_connections_and_listens_again_on_its_port() -> None:
    with ScriptedServer([200]) as server:
        for _ in range(2):
            assert asked(server) == b"HTTP/1.1 200"
            server.refuse()
            with pytest.raises(ConnectionRefusedError):
                asked(server)
            server.listen()
        assert asked(server) == b"HTTP/1.1 200"
