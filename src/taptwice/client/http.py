"""`Client` and `AsyncClient`: httpx2, or httpx, with keys, one deadline and retries that are safe.

    client = Client("https://api.example.com", namespace="shop-prod")
    response = client.post("/v1/payments", json=body, intent="checkout-4711")

What a call did stands in ``report(response)``. Everything httpx2's own client takes goes through.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from taptwice.client.calls import ClientCall
from taptwice.client.errors import missing
from taptwice.client.exchange import aattempt, attempt, library_of, prepare
from taptwice.client.gate import Gates, MakeBreaker, MakeBudget
from taptwice.client.keys import check_namespace
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import StopReason
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener, Report, attach
from taptwice.client.settings import check
from taptwice.client.urls import Urls
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.errors import Misuse, TaptwiceError

if TYPE_CHECKING:
    from typing import Self, Unpack

    from httpx2 import Response

    from taptwice.client.wish import Sent

__all__ = ["AsyncClient", "Client"]

Reply = TypeVar("Reply")


class Options(TypedDict, total=False):
    """What every call takes. The first four are ours, the others go to httpx2 as they are."""

    intent: str
    """The name of what is wanted; the key is made from it and the client's namespace."""
    idempotency_key: str
    """The key itself."""
    deadline: float | None
    """Seconds for this call, instead of the policy's."""
    content: Any
    """Bytes, text, a file (from where it stands), a function that makes the body, an iterable."""
    data: Any
    files: Any
    json: Any
    params: Any
    headers: Any
    cookies: Any
    timeout: Any
    """httpx2's own, for single reads and writes; the deadline holds beside it."""
    extensions: Any
    auth: Any
    follow_redirects: bool


class _Verbs(Generic[Reply]):
    """The methods by their names; `request` is the blocking or the awaiting client's."""

    def request(self, method: str, url: str, **options: Unpack[Options]) -> Reply:
        """Make one call. Raises the library's exceptions, and those of `taptwice.client.errors`."""
        raise NotImplementedError

    def get(self, url: str, **options: Unpack[Options]) -> Reply:
        """GET."""
        return self.request("GET", url, **options)

    def head(self, url: str, **options: Unpack[Options]) -> Reply:
        """HEAD."""
        return self.request("HEAD", url, **options)

    def options(self, url: str, **options: Unpack[Options]) -> Reply:
        """OPTIONS."""
        return self.request("OPTIONS", url, **options)

    def put(self, url: str, **options: Unpack[Options]) -> Reply:
        """PUT."""
        return self.request("PUT", url, **options)

    def delete(self, url: str, **options: Unpack[Options]) -> Reply:
        """DELETE."""
        return self.request("DELETE", url, **options)

    def post(self, url: str, **options: Unpack[Options]) -> Reply:
        """POST; it gets a key if it has none."""
        return self.request("POST", url, **options)

    def patch(self, url: str, **options: Unpack[Options]) -> Reply:
        """PATCH; it gets a key if it has none."""
        return self.request("PATCH", url, **options)


class _Base(_Verbs[Reply]):
    """What both clients are; they differ in how they wait."""

    _awaiting: bool
    _kind: str

    def __init__(
        self,
        base_url: str = "",
        *,
        policy: RetryPolicy = DEFAULT,
        namespace: str | None = None,
        intents: Any = None,
        budget: MakeBudget = RetryBudget,
        breaker: MakeBreaker = None,
        listeners: Sequence[Listener] = (),
        world: World = REAL,
        http: Any = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of httpx2's client; `http` is such a client made already (httpx's will do).

        `namespace` says which application this is, and in which environment, for the keys of intents.
        `intents` is an `IntentStore`, or for `AsyncClient` an `AsyncIntentStore`: it binds intents to their
        requests, and keeps their answers.
        `budget` and `breaker` make one for each origin that is called (``breaker=CircuitBreaker``); None is
        for none.
        """
        check(policy, listeners, world)
        check_namespace(namespace)
        if misplaced := {field.name for field in dataclasses.fields(RetryPolicy)} & set(settings):
            given = ", ".join(f"{name}={settings[name]!r}" for name in sorted(misplaced))
            raise Misuse(f"{given}: this belongs in the policy, policy=RetryPolicy({given})")
        if http is None:
            try:
                import httpx2
            except ModuleNotFoundError:
                raise missing("httpx2", "client") from None
            settings.setdefault("timeout", None)  # the policy's limits are enough, and all hold
            http = getattr(httpx2, self._kind)(base_url=base_url, **settings)
        elif base_url or settings:
            raise Misuse("give http=… its base_url and settings itself: they would be ignored here")
        self._http = http
        self._urls = Urls(http)
        self._lib = library_of(http)
        if not isinstance(http, getattr(self._lib, self._kind)):
            other = "AsyncClient" if type(self).__name__ == "Client" else "Client"
            raise Misuse(
                f"http={type(http).__name__}(…): {type(self).__name__} wants a"
                f" {self._lib.__name__}.{self._kind}; for this one take {other}"
            )
        for transport in (http._transport, *http._mounts.values()):
            prepare(self._lib, transport)
        self._policy = policy
        self._namespace = namespace
        if intents is not None and not hasattr(intents, "fulfil"):
            raise Misuse(f"intents={intents!r}: give a store, intents=IntentStore('intents.db')")
        if intents is not None and inspect.iscoroutinefunction(intents.fulfil) != self._awaiting:
            wanted = "AsyncIntentStore" if self._awaiting else "IntentStore"
            raise Misuse(f"intents={type(intents).__name__}(…): this client wants an {wanted}")
        self._intents = intents
        self._gates = Gates(budget, breaker)
        self._listeners = listeners
        self._world = world
        self._single = False
        if policy.key_header in http.headers:
            raise Misuse(
                f"{policy.key_header} stands in the client's headers: every call would send that key"
            )

    def with_options(self, *, namespace: str | None = None, **changes: Any) -> Self:
        """A client with other settings of the policy, on the same connections, budgets and circuits."""
        check_namespace(namespace)
        other = copy.copy(self)
        other._policy = self._policy.replace(**changes)
        other._namespace = namespace or self._namespace
        return other

    def single_attempt(self) -> Self:
        """A client on the same connections that never retries: for calls inside a retry loop of your own."""
        other = copy.copy(self)
        other._single = True
        return other

    def _call(self, method: str, url: str, options: Any, whole: bool) -> ClientCall:
        try:
            return ClientCall(self, method, url, options, whole)
        except TaptwiceError as error:
            attach(error, Report((), StopReason.NOT_BEGUN, Outcome.NOT_SENT, None, None))
            raise


class Client(_Base["Response"]):
    """A blocking client; threads may share it."""

    _awaiting = False
    _kind = "Client"

    def request(self, method: str, url: str, **options: Unpack[Options]) -> Response:
        """Make one call. Raises the library's exceptions, and those of `taptwice.client.errors`."""
        response: Response = self._make(self._call(method, url, options, whole=True))
        return response

    @contextmanager
    def stream(self, method: str, url: str, **options: Unpack[Options]) -> Iterator[Response]:
        """Make one call and hand the response over before its body is read.

        Until the first piece of the body has come another attempt may take the place of one that broke;
        what breaks then is yours.
        """
        response: Response = self._make(self._call(method, url, options, whole=False))
        try:
            yield response
        finally:
            response.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, going: ClientCall) -> Any:
        def once(limit: Limit) -> Seen:
            request, whole = going.fresh(), going.whole
            return attempt(going, self._lib, request, limit, whole, going.send, _read)

        if going.wish is None:
            return going.conclude(going.run(once), once)

        def send(key: str) -> Sent[Any]:
            return going.sent(going.under(key).run(once), once)

        try:
            found = self._intents.fulfil(going.wish, send)
        except TaptwiceError as error:
            going.explain(error)
            raise
        return found.response if hasattr(found, "response") else going.remembered(found)


class AsyncClient(_Base[Coroutine[Any, Any, "Response"]]):
    """An awaiting client, on asyncio or trio."""

    _awaiting = True
    _kind = "AsyncClient"

    async def request(self, method: str, url: str, **options: Unpack[Options]) -> Response:
        """Make one call. Raises the library's exceptions, and those of `taptwice.client.errors`."""
        response: Response = await self._make(self._call(method, url, options, whole=True))
        return response

    @asynccontextmanager
    async def stream(self, method: str, url: str, **options: Unpack[Options]) -> AsyncIterator[Response]:
        """As `Client.stream`."""
        response: Response = await self._make(self._call(method, url, options, whole=False))
        try:
            yield response
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _make(self, going: ClientCall) -> Any:
        async def once(limit: Limit) -> Seen:
            request, whole = going.fresh(), going.whole
            return await aattempt(going, self._lib, request, limit, whole, going.send, _aread)

        if going.wish is None:
            return going.conclude(await going.arun(once), once)

        async def send(key: str) -> Sent[Any]:
            return going.sent(await going.under(key).arun(once), once)

        try:
            found = await self._intents.fulfil(going.wish, send)
        except TaptwiceError as error:
            going.explain(error)
            raise
        return found.response if hasattr(found, "response") else going.remembered(found)


def _read(response: Any) -> Any:
    response.read()
    return response


async def _aread(response: Any) -> Any:
    await response.aread()
    return response
