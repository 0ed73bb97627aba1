"""One call of `Client` or `AsyncClient`: its request, its key, and what becomes of an intent."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from taptwice.client.bodies import Body, in_memory
from taptwice.client.gate import Gates
from taptwice.client.keys import key_of, new_key
from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import Call, StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Listener, Report, attach
from taptwice.client.shell import Going
from taptwice.client.streams import Once, concluded
from taptwice.client.world import World
from taptwice.core.header import format_key
from taptwice.core.model import Answer
from taptwice.errors import Misuse, TaptwiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taptwice.client.urls import Urls
    from taptwice.client.wish import Sent, Wish
    from taptwice.stores.intents import Intent

__all__ = ["Caller", "ClientCall"]

_OF_SEND = ("auth", "follow_redirects")
_ALWAYS_THE_SAME = (bytes, str, type(None))


class Caller(Protocol):
    """What a call wants to know of its client."""

    _awaiting: bool
    _gates: Gates
    _http: Any
    _intents: Any
    _lib: ModuleType
    _listeners: Sequence[Listener]
    _namespace: str | None
    _policy: RetryPolicy
    _single: bool
    _urls: Urls
    _world: World


class ClientCall(Going):
    """One call of a client: a shell, and the request, which is made anew where it must be."""

    __slots__ = ("_body", "_build", "_http", "_key", "_lib", "_sending", "request", "whole", "wish")

    def __init__(self, client: Caller, method: str, url: str, options: Any, whole: bool) -> None:
        policy, world = client._policy, client._world
        begun = world.clock()
        intent, key = options.pop("intent", None), options.pop("idempotency_key", None)
        if intent is not None or key is not None:
            key = _key(client, intent, key)
        remembered = intent is not None and client._intents is not None
        if remembered:
            options["content"] = in_memory(options.get("content"))
        if "deadline" in options:
            policy = policy.replace(deadline=options.pop("deadline"))
        self._lib = client._lib
        self._http = client._http
        self.whole = whole
        self._sending = {}
        for name in _OF_SEND:
            if name in options:
                self._sending[name] = options.pop(name)
        self._key: tuple[str, str] | None = None
        self._body: Body | None = None
        url = client._urls.merged(url)
        if isinstance(options.get("content"), _ALWAYS_THE_SAME):
            self.request = client._http.build_request(method, url, **options)
        else:
            self._body = Body(options.pop("content"), awaiting=client._awaiting)
            self._build = partial(client._http.build_request, method, url, **options)
            self.request = self._made(self._body)
        if "files" in options:
            self.request.read()  # a file read again from its beginning may be another body than the first
        method = self.request.method
        own = self._own_key(policy, options["headers"]) if "headers" in options else None
        if own is None and key is None and policy.auto_key and method in ("POST", "PATCH"):
            key = new_key()
        if key is not None:
            if own is not None:
                raise Misuse(f"the call has a key, and {policy.key_header} in its headers: give one of them")
            self._carry(policy, key)
        target = self.request.url
        origin = f"{target.scheme}://{target.netloc.decode('ascii')}"
        call = Call(
            policy,
            begun,
            method=method,
            key=own or key,
            replayable=self._body is None or self._body.replayable,
            single=client._single,
        )
        super().__init__(call, client._gates[origin], world, client._listeners, origin)
        self.wish = self._wish(intent) if remembered else None

    def _own_key(self, policy: RetryPolicy, headers: Any) -> str | None:
        wanted = policy.key_header.lower()
        if isinstance(headers, dict):  # the usual case, and the library's own headers are slow to ask
            for name, value in headers.items():
                if not isinstance(name, str):
                    break
                if name.lower() == wanted:
                    if isinstance(value, str):
                        return value
                    break
            else:
                return None
        key: str | None = self.request.headers.get(wanted)
        return key

    def _wish(self, intent: str) -> Wish:
        from taptwice.client.wish import Wish, fingerprint_of

        request, deadline = self.request, self.call.policy.deadline
        lasts = (
            math.inf if deadline is None else deadline
        )  # the last retry must lie in the server's window too
        kind = request.headers.get("content-type", "")
        print_ = fingerprint_of(request.method, str(request.url), request.content, kind)
        return Wish(intent, print_, self.call.key or "", lasts)

    def under(self, key: str) -> ClientCall:
        """The same call under the key that its intent has."""
        self._carry(self.call.policy, key)
        self.call.key = key
        return self

    def sent(self, seen: Seen, once: Once) -> Sent[Any]:
        """What the store wants to know: the response, and the answer if that is final."""
        from taptwice.client.wish import Sent

        response = self.conclude(seen, once)
        if seen.outcome is not Outcome.PROCESSED:
            return Sent(response, None)
        headers = tuple(response.headers.items())
        return Sent(response, Answer(response.status_code, headers, response.content if self.whole else None))

    def remembered(self, intent: Intent) -> Any:
        """The response that was kept."""
        kept = intent.answer or Answer(204)
        found = Report((), StopReason.REMEMBERED, Outcome.PROCESSED, intent.key, None)
        return self._lib.Response(
            kept.status,
            headers=list(kept.headers),
            content=kept.body,
            request=self.request,
            extensions={"taptwice": found},
        )

    def explain(self, error: TaptwiceError) -> None:
        """Give an error of the store's a report. Nothing was sent now; what was before, nobody could look."""
        if hasattr(error, "taptwice"):
            return
        attempts, stop = tuple(self.call.attempts), self.call.stop or StopReason.NOT_BEGUN
        key = self.call.key if attempts else None  # before, it is what the intent would get if it has none
        attach(error, Report(attempts, stop, Outcome.UNKNOWN, key, None))

    def fresh(self) -> Any:
        """The request for the next attempt."""
        if self._body is not None and self.call.attempts:
            self.request = self._made(self._body)
        return self.request

    def conclude(self, seen: Seen, once: Once) -> Any:
        """The response, or the error; `once` makes an attempt."""
        return concluded(self, self._lib, seen, self.request, once, typed=True)

    def send(self, request: Any) -> Any:
        """The response of httpx2's client, or an awaitable one."""
        return self._http.send(request, stream=True, **self._sending)

    def _carry(self, policy: RetryPolicy, key: str) -> None:
        self._key = policy.key_header, format_key(key, policy.key_quoting == "sf-string")
        self.request.headers[self._key[0]] = self._key[1]

    def _made(self, body: Body) -> Any:
        request = self._build(content=body.make())
        for name, value in body.headers.items():
            request.headers[name] = value
            request.headers.pop("Transfer-Encoding", None)
        if self._key is not None:
            request.headers[self._key[0]] = self._key[1]
        return request


def _key(client: Caller, intent: Any, key: Any) -> str:
    """The key that a call is given: itself, or by the name of its intent."""
    for name, value in (("intent", intent), ("idempotency_key", key)):
        if value is not None and (not isinstance(value, str) or not value):
            raise Misuse(f"{name}={value!r}: give text that is not empty, as {name}='order-17'")
    if intent is None:
        return str(key)
    if key is not None:
        raise Misuse("give intent or idempotency_key, not both: the key is made from the intent")
    drawn = client._intents is not None and not client._namespace
    return new_key() if drawn else key_of(client._namespace, intent)
