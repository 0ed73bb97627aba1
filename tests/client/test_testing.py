"""The scripted server itself."""

from __future__ import annotations

import socket

import pytest

from taptwice.client.testing import ScriptedServer


def asked(server: ScriptedServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connection.recv(12)


def test_it_refuses_connections_and_listens_again_on_its_port() -> None:
    with ScriptedServer([200]) as server:
        for _ in range(2):
            assert asked(server) == b"HTTP/1.1 200"
            server.refuse()
            with pytest.raises(ConnectionRefusedError):
                asked(server)
            server.listen()
        assert asked(server) == b"HTTP/1.1 200"
