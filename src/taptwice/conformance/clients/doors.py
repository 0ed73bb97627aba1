"""Every way into the client, by the name that `--client` gives it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from taptwice.client.errors import missing
from taptwice.conformance.wire import Response

INTENTS = "intents.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every door is opened with."""

    shared: Mapping[str, Any]
    """What all ways take: policy, world, budget, breaker, listeners."""
    folder: Path
    """Where intents are remembered."""


class Asked(NamedTuple):
    """One call that the client is asked to make."""

    method: str
    path: str
    body: bytes | None
    """JSON."""
    intent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One way in. `open` gives the client; `call` makes one call, and is awaited where `awaiting`."""

    library: str
    extra: str
    awaiting: bool
    intents: bool
    """Whether it knows intents by their names."""
    open: Callable[[Door, Options], Any]
    call: Callable[[Any, Door, str, Asked], Any]
    close: str = "close"

    def module(self, name: str) -> Any:
        """A module of its library, or of ours beneath it."""
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name == self.library:
                raise missing(self.library, self.extra) from None
            raise


def _client(door: Door, options: Options) -> Any:
    from taptwice.client import http
    from taptwice.client.intents import AsyncIntentStore, IntentStore

    store = AsyncIntentStore if door.awaiting else IntentStore
    library = door.module(door.library)
    kind = library.AsyncClient if door.awaiting else library.Client
    ours = http.AsyncClient if door.awaiting else http.Client
    return ours(
        # No proxy stands before our server.
        http=kind(timeout=None, follow_redirects=True, trust_env=False, verify=_trusting_nobody()),
        # The key alone is kept: whoever asks again asks the server, which is what a case wants to see.
        intents=store(options.folder / INTENTS, window=None, keep="key"),
        **options.shared,
    )


def _transport(door: Door, options: Options) -> Any:
    ours = door.module(f"taptwice.client.{door.library}")
    library = door.module(door.library)
    below = library.AsyncHTTPTransport if door.awaiting else library.HTTPTransport
    kind = ours.AsyncRetryTransport if door.awaiting else ours.RetryTransport
    client = library.AsyncClient if door.awaiting else library.Client
    transport = kind(**options.shared, wrapping=below(verify=_trusting_nobody()))
    return client(transport=transport, timeout=None, follow_redirects=True)


def _trusting_nobody() -> ssl.SSLContext:
    """The server is a plain one, and to load the certificates of the world takes longer than most cases."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _arguments(asked: Asked) -> dict[str, Any]:
    if asked.body is None:
        return {}
    return {"content": asked.body, "headers": {"Content-Type": "application/json"}}


def _call(client: Any, door: Door, url: str, asked: Asked) -> Any:
    options = _arguments(asked)
    if asked.intent is not None and door.intents:
        options["intent"] = asked.intent
    return client.request(asked.method, url + asked.path, **options)


def _session(door: Door, options: Options) -> Any:
    adapter = door.module("taptwice.client.requests").RetryAdapter(**options.shared)
    session = door.module("requests").Session()
    session.trust_env = False
    session.mount("http://", adapter)
    return session


def _call_session(session: Any, door: Door, url: str, asked: Asked) -> Any:
    options = _arguments(asked)
    return session.request(asked.method, url + asked.path, data=options.pop("content", None), **options)


async def _aiohttp(door: Door, options: Options) -> Any:
    middleware = door.module("taptwice.client.aiohttp").RetryMiddleware(**options.shared)
    return door.module("aiohttp").ClientSession(middlewares=[middleware])


async def _call_aiohttp(session: Any, door: Door, url: str, asked: Asked) -> Any:
    options = _arguments(asked)
    content = options.pop("content", None)
    async with session.request(asked.method, url + asked.path, data=content, **options) as response:
        response.taptwice_body = await response.read()  # it can be had by waiting only
        return response


def _wrapped(library: str, extra: str) -> dict[str, Door]:
    """The doors of httpx2 or httpx."""
    found = {}
    for name, open_, intents in ((library, _client, True), (f"{library}-transport", _transport, False)):
        for awaiting in (False, True):
            found[f"{name}-async" if awaiting else name] = Door(
                library=library,
                extra=extra,
                awaiting=awaiting,
                intents=intents,
                open=open_,
                call=_call,
                close="aclose" if awaiting else "close",
            )
    return found


DOORS: Mapping[str, Door] = {
    **_wrapped("httpx2", "client"),
    **_wrapped("httpx", "httpx"),
    "requests": Door(
        library="requests",
        extra="requests",
        awaiting=False,
        intents=False,
        open=_session,
        call=_call_session,
    ),
    "aiohttp": Door(
        library="aiohttp",
        extra="aiohttp",
        awaiting=True,
        intents=False,
        open=_aiohttp,
        call=_call_aiohttp,
    ),
}


def answered(response: Any) -> Response:
    """An answer of any of the libraries, as the judge reads it."""
    headers = list(response.headers.items())
    if hasattr(response, "status_code"):
        return Response(response.status_code, headers, response.content)
    return Response(response.status, headers, response.taptwice_body)
