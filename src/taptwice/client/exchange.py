"""One attempt through httpx2 or httpx: send, head, whole body. Written once, for clients and transports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from taptwice.client.errors import DeadlineExceeded, KeyRejected, KeyReused, kin
from taptwice.client.limits import AsyncWatchedBackend, Limit, WatchedBackend, watch
from taptwice.client.outcome import Outcome, Seen, of_answer, of_error
from taptwice.client.plan import StopReason
from taptwice.client.reports import attach
from taptwice.client.shell import Going
from taptwice.errors import CircuitOpen, Misuse


def library_of(thing: Any) -> ModuleType:
    """httpx2 or httpx, whichever a client is of."""
    for kind in type(thing).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in ("httpx2", "httpx"):
            return import_module(name)
    raise Misuse(f"http={thing!r}: {type(thing).__name__} is no client of httpx2 or httpx")


def prepare(lib: ModuleType, transport: Any) -> None:
    """Watch a transport's connections, and see that it does not retry by itself."""
    pool = getattr(transport, "_pool", None)
    if getattr(pool, "_retries", 0):
        raise Misuse("the transport below has retries=…: they would multiply with ours, so set it to 0")
    core = import_module("httpcore2" if lib.__name__ == "httpx2" else "httpcore")
    blocking = hasattr(transport, "handle_request")
    watch(transport, core, WatchedBackend if blocking else AsyncWatchedBackend)


def stamp(going: Going, limit: Limit, request: Any) -> None:
    """Give a request this attempt's time limits, and tell the server of them."""
    extensions = request.extensions
    extensions["timeout"] = limit.timeouts(extensions.get("timeout") or {})
    going.stamp(limit, request.headers)


def attempt(
    going: Going,
    lib: ModuleType,
    request: Any,
    limit: Limit,
    whole: bool | None,
    send: Callable[[Any], Any],
    read: Callable[[Any], Any],
) -> Seen:
    """Make an attempt. `whole`: read a good answer's body too; None: if it says that it is small.

    `send` gives a response with its head complete and its body unread, `read` one that holds its body.
    """
    response = None
    stamp(going, limit, request)
    try:
        response = send(request)
        if unread := not _wanted(response, whole):
            limit.end = going.call.end  # the caller reads on, under the whole call's limit
        else:
            response = read(response)
    except (lib.HTTPError, OSError) as error:
        if response is not None:
            response.close()
        return _broken(going, lib, limit, error, head=response is not None)
    return _judged(going, lib, response, unread)


async def aattempt(
    going: Going,
    lib: ModuleType,
    request: Any,
    limit: Limit,
    whole: bool | None,
    send: Callable[[Any], Awaitable[Any]],
    read: Callable[[Any], Awaitable[Any]],
) -> Seen:
    """The awaiting twin of `attempt`."""
    response = None
    stamp(going, limit, request)
    try:
        response = await send(request)
        if unread := not _wanted(response, whole):
            limit.end = going.call.end
        else:
            response = await read(response)
    except (lib.HTTPError, OSError) as error:
        if response is not None:
            await response.aclose()
        return _broken(going, lib, limit, error, head=response is not None)
    return _judged(going, lib, response, unread)


def _wanted(response: Any, whole: bool | None) -> bool:
    return bool(whole) or response.status_code >= 400 or (whole is None and _is_small(response))


def _broken(going: Going, lib: ModuleType, limit: Limit, error: Exception, head: bool) -> Seen:
    if isinstance(error, lib.HTTPStatusError):  # raised by an event hook of the client's, as many do
        judged = _judged(going, lib, error.response)
        return judged._replace(answer=None, error=error, permanent=judged.final)
    return of_error(error, head, limit.wrote)


def _judged(going: Going, lib: ModuleType, response: Any, unread: bool = False) -> Seen:
    policy, status = going.call.policy, response.status_code
    if status < 400:
        return Seen(Outcome.PROCESSED, status, response, open=unread and not response.is_closed)
    return of_answer(policy, response, status, response.headers.get, lambda: _content(lib, response))


_SMALL = 1_048_576


def _is_small(response: Any) -> bool:
    length = response.headers.get("content-length", "")
    return response.status_code == 204 or (length.isdecimal() and int(length) <= _SMALL)


def _content(lib: ModuleType, response: Any) -> bytes:
    """The body, decoded. What a transport hands on is not; a copy of it is."""
    if not hasattr(response, "_content"):
        if not isinstance(response.stream, lib.ByteStream):
            return b""  # an event hook has raised before the body was read
        response = lib.Response(response.status_code, headers=response.headers, stream=response.stream)
    try:
        content: bytes = response.read()
    except lib.DecodingError:
        return b""
    return content


_TYPED = {
    "key-reused": KeyReused,
    "key-missing": KeyRejected,
    "key-invalid": KeyRejected,
    "key-expired": KeyRejected,
}


def conclude(going: Going, lib: ModuleType, seen: Seen, request: Any, *, typed: bool) -> Any:
    """Give the response back, or raise. `typed`: raise an answer that refuses the key as an error of ours."""
    report = going.report(seen)
    error: Exception | None = seen.error
    if error is None:
        response = seen.answer
        response.extensions["taptwice"] = report
        kind = _TYPED.get(seen.problem or "") if typed else None
        if kind is None:
            return response
        error = kind(_detail(response), response)
    elif isinstance(error, CircuitOpen):
        error = kin(CircuitOpen, lib.TransportError)(error.retry_after, error.origin, _request=request)
    elif going.cut and report.stop_reason is StopReason.DEADLINE:
        late = kin(DeadlineExceeded, lib.TimeoutException)(going.too_late(seen), _request=request)
        attach(late, report)
        raise late from error
    attach(error, report)
    raise error


def _detail(response: Any) -> str | None:
    detail = response.json().get("detail")
    return detail if isinstance(detail, str) else None
