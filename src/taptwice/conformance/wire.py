"""HTTP/1.1 on bare sockets, so that every line of a request leaves exactly as a case gives it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import random
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

NO_RESPONSE = 0
"""The status of an answer that never came."""

Line = tuple[bytes, bytes]
Connected = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Request:
    """A request in bytes. `whole` False: the connection is closed after `body`."""

    method: str
    path: str
    lines: tuple[Line, ...]
    body: bytes
    chunked: bool = False
    whole: bool = True

    def head(self, host: str) -> bytes:
        """Everything in front of the body."""
        start = f"{self.method} {self.path} HTTP/1.1".encode()
        lines = ((b"Host", host.encode()), *self.lines, (b"Connection", b"close"))
        return b"\r\n".join([start, *(name + b": " + value for name, value in lines), b"", b""])

    def payload(self) -> bytes:
        """The body as it is transferred."""
        if not self.chunked:
            return self.body
        half = len(self.body) // 2 or len(self.body)
        parts = [part for part in (self.body[:half], self.body[half:]) if part]
        return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    @property
    def expects(self) -> bool:
        """Whether it waits for 100 Continue."""
        return any(name.lower() == b"expect" for name, _ in self.lines)


@dataclass(slots=True)
class Response:
    """An answer as it came. Status `NO_RESPONSE`: the client saw none."""

    status: int = NO_RESPONSE
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    elapsed_ms: float = 0.0
    redirects: list[int] = field(default_factory=list)

    def lines(self, name: str) -> list[str]:
        """The values of a header, one a line."""
        return [value for known, value in self.headers if known.lower() == name.lower()]

    def header(self, name: str) -> str | None:
        """The first of them."""
        return next(iter(self.lines(name)), None)

    def decoded(self) -> bytes:
        """The body without its content encoding."""
        return gzip.decompress(self.body) if self.header("Content-Encoding") == "gzip" else self.body

    def json(self) -> Any:
        """The body, parsed; None when it is no JSON."""
        try:
            return json.loads(self.decoded())
        except (ValueError, OSError):
            return None


# --- from a case to a request ---------------------------------------------------------------------------


def login(caller: str | None) -> list[Line]:
    """The lines that say who is calling, in the reference applications; None is nobody."""
    return [] if caller is None else [(b"Authorization", f"Bearer {caller}".encode())]


def request_of(
    spec: Mapping[str, Any], key_header: str, login: Callable[[str | None], list[Line]] = login
) -> Request:
    """The request that a case describes."""
    lines = login(spec.get("as", "acct_a"))
    if "key" in spec:
        lines.append((key_header.encode(), spec["key"].encode()))
    lines += [(name.encode(), value.encode()) for name, value in spec.get("headers", ())]
    lines += [(name.encode(), base64.b64decode(value)) for name, value in spec.get("headers_b64", ())]
    body, kind = _body(spec)
    kind = spec.get("content_type", kind)
    if kind is not None:
        lines.append((b"Content-Type", kind.encode()))
    if (encoding := spec.get("content_encoding")) is not None:
        body = _ENCODERS[encoding](body)
        lines.append((b"Content-Encoding", encoding.encode()))
    chunked = spec.get("transfer") == "chunked"
    if chunked:
        lines.append((b"Transfer-Encoding", b"chunked"))
    elif body or spec.get("method", "POST") not in ("GET", "HEAD", "OPTIONS"):
        lines.append((b"Content-Length", str(len(body)).encode()))
    cut = spec.get("truncate_body_after")
    path = quote(spec.get("path", "/payments"), safe="/?&=%:@!$'()*+,;~-._[]")
    return Request(
        spec.get("method", "POST"), path, tuple(lines), body[:cut], chunked and cut is None, cut is None
    )


_ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "deflate": zlib.compress,
    "identity": lambda body: body,
}


def _body(spec: Mapping[str, Any]) -> tuple[bytes, str | None]:
    """The bytes of the body, and the media type that goes with them."""
    if "json" in spec:
        return json.dumps(
            spec["json"], ensure_ascii=False, separators=(",", ":")
        ).encode(), "application/json"
    if "body" in spec:
        return spec["body"].encode(), "application/json"
    if "body_b64" in spec:
        return base64.b64decode(spec["body_b64"]), "application/octet-stream"
    if "body_gen" in spec:
        wanted = spec["body_gen"]
        return random.Random(wanted["seed"]).randbytes(wanted["size"]), "application/octet-stream"
    if "form" in spec:
        form = spec["form"]
        pairs = form if isinstance(form, Mapping) else [tuple(pair) for pair in form]
        text = form if isinstance(form, str) else urlencode(pairs, doseq=True)
        return text.encode(), "application/x-www-form-urlencoded"
    if "multipart" in spec:
        return _multipart(spec["multipart"])
    return b"", None


def _multipart(spec: Mapping[str, Any]) -> tuple[bytes, str]:
    boundary = str(spec.get("boundary", "taptwice")).encode()
    body = b""
    for part in spec["parts"]:
        disposition = f'form-data; name="{part["name"]}"'
        if "filename" in part:
            disposition += f'; filename="{part["filename"]}"'
        lines = [f"Content-Disposition: {disposition}"]
        if "content_type" in part:
            lines.append(f"Content-Type: {part['content_type']}")
        content = base64.b64decode(part["b64"]) if "b64" in part else part["text"].encode()
        body += b"--" + boundary + b"\r\n" + "\r\n".join(lines).encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + b"--" + boundary + b"--\r\n", f"multipart/form-data; boundary={boundary.decode()}"


# --- on the wire ----------------------------------------------------------------------------------------


class Incoming:
    """The bytes that come in on a socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = b""

    async def _more(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._link, 262_144)
        if not data:
            raise EOFError
        self._buffer += data

    async def until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            await self._more()
        found, _, self._buffer = self._buffer.partition(end)
        return found

    async def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    async def rest(self) -> bytes:
        with suppress(EOFError):
            while True:
                await self._more()
        return self._buffer

    async def answer(self, method: str, response: Response) -> None:
        """Read a final answer, whatever interim ones come before it."""
        while await self.head(response) < 200:
            pass
        await self.body(method, response)

    async def head(self, response: Response) -> int:
        """Read one head; its status."""
        start, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(start.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines)
        response.headers = [(name, value.strip()) for name, _, value in pairs]
        response.status = status if status >= 200 else NO_RESPONSE
        return status

    async def body(self, method: str, response: Response) -> None:
        """Read the body that belongs to the head."""
        if method == "HEAD" or response.status in (204, 304):
            return
        length = response.header("Content-Length")
        if length is not None:
            response.body = await self.exactly(int(length))
        elif (response.header("Transfer-Encoding") or "").lower() == "chunked":
            while size := int((await self.until(b"\r\n")).split(b";")[0], 16):
                response.body += (await self.exactly(size + 2))[:-2]
        else:
            response.body = await self.rest()


@dataclass(slots=True)
class Call:
    """One request on its way, on a connection of its own, which can be hung up."""

    address: tuple[str, int]
    host: str = ""
    """What it calls the server, where that is not its address."""
    link: socket.socket | None = None
    _hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, request: Request, connected: Connected | None = None) -> Response:
        """Send and await the answer. `connected` is called with our port before anything is sent."""
        response = Response()
        work = asyncio.ensure_future(self._send(request, connected, response))
        left = asyncio.ensure_future(self._hung_up.wait())
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else response
        finally:
            work.cancel()
            left.cancel()
            await asyncio.wait({work, left})
            if self.link is not None:
                self.link.close()

    async def _send(self, request: Request, connected: Connected | None, response: Response) -> Response:
        loop = asyncio.get_running_loop()
        self.link = socket.socket()
        self.link.setblocking(False)
        started = time.monotonic()
        try:
            await loop.sock_connect(self.link, self.address)
            if connected is not None:
                await connected(self.link.getsockname()[1])
                started = time.monotonic()
            incoming = Incoming(self.link)
            host = self.host or f"{self.address[0]}:{self.address[1]}"
            await loop.sock_sendall(self.link, request.head(host))
            if request.expects and await incoming.head(response) != 100:
                await incoming.body(request.method, response)
            elif not request.whole:
                await loop.sock_sendall(self.link, request.payload())
            else:
                # At once: a server may answer and hang up while a large body is still being sent.
                sending = asyncio.ensure_future(loop.sock_sendall(self.link, request.payload()))
                try:
                    await incoming.answer(request.method, response)
                finally:
                    sending.cancel()
                    await asyncio.wait({sending})
                    _ = sending.cancelled() or sending.exception()
        except (OSError, EOFError, ValueError):
            pass  # what came until then is the answer
        response.elapsed_ms = (time.monotonic() - started) * 1000
        return response

    def hang_up(self) -> None:
        """Close the connection, whatever is under way on it."""
        self._hung_up.set()


CONTROL = "/_conformance"


async def ask(call: Call, command: Mapping[str, Any], path: str = CONTROL) -> dict[str, Any]:
    """A command of the control interface, and its reply. Raises RuntimeError."""
    body = json.dumps(command).encode()
    lines = ((b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode()))
    response = await call.send(Request("POST", path, lines, body))
    if response.status != 200:
        raise RuntimeError(f"the control interface answered {response.status}: {response.body.decode()}")
    reply: dict[str, Any] = response.json()
    return reply


def redirected(request: Request, response: Response) -> Request | None:
    """The request that follows a redirect; None when there is nothing to follow.

    307 and 308 keep method and body; the others become a GET, as browsers and HTTP clients do it.
    """
    location = response.header("Location")
    if response.status not in (301, 302, 303, 307, 308) or location is None:
        return None
    parts = urlsplit(location)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if response.status in (307, 308) or request.method in ("GET", "HEAD"):
        return Request(request.method, path, request.lines, request.body, request.chunked)
    of_the_body = (b"content-type", b"content-length", b"transfer-encoding", b"content-encoding")
    lines = tuple(line for line in request.lines if line[0].lower() not in of_the_body)
    return Request("GET", path, lines, b"")
