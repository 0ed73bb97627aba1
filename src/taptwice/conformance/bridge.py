"""A WSGI application behind an ASGI server, as it would stand behind gunicorn: each request in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 256


class Broken(io.RawIOBase):
    """A body whose sender went away in the middle: what came, and then an error."""

    def __init__(self, body: bytes) -> None:
        self._body = io.BytesIO(body)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        found = self._body.read(size)
        if not found:
            raise ConnectionResetError("the client closed the connection")
        return found


class Bridge:
    """The ASGI face of a WSGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._threads = ThreadPoolExecutor(THREADS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
        environ = environ_of(scope, Broken(body) if more else io.BytesIO(body))
        loop = asyncio.get_running_loop()
        # Not cancelled with the request: a thread goes on when its client has left.
        context = contextvars.copy_context()
        await loop.run_in_executor(
            self._threads, lambda: context.run(self._serve, environ, self._sending(loop, send, context))
        )

    def _sending(
        self, loop: asyncio.AbstractEventLoop, send: Any, context: contextvars.Context
    ) -> Callable[[Any], None]:
        def sending(message: Any) -> None:
            asyncio.run_coroutine_threadsafe(send(message), loop).result()

        return sending

    def _serve(self, environ: dict[str, Any], send: Callable[[Any], None]) -> None:
        started: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            lines = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            started[:] = [{"type": "http.response.start", "status": int(status[:3]), "headers": lines}]
            return lambda data: send({"type": "http.response.body", "body": data, "more_body": True})

        parts = self._app(environ, start_response)
        try:
            for part in parts:
                while started:
                    send(started.pop())
                if part:
                    send({"type": "http.response.body", "body": part, "more_body": True})
            while started:
                send(started.pop())
            send({"type": "http.response.body", "body": b""})
        finally:
            if hasattr(parts, "close"):
                parts.close()


def environ_of(scope: Any, body: Any) -> dict[str, Any]:
    """What PEP 3333 wants to know of a request."""
    query = scope["query_string"].decode("latin-1")
    raw = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": scope["path"].encode().decode("latin-1"),
        "RAW_URI": raw + (f"?{query}" if query else ""),
        "QUERY_STRING": query,
        "SERVER_NAME": scope["server"][0],
        "SERVER_PORT": str(scope["server"][1]),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": scope["client"][0],
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": body,
        "wsgi.input_terminated": True,
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    for name, value in scope["headers"]:
        text = name.decode("latin-1").upper().replace("-", "_")
        text = text if text in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{text}"
        line = value.decode("latin-1")
        environ[text] = f"{environ[text]},{line}" if text in environ else line
    return environ
