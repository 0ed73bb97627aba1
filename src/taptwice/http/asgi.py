"""The edge for ASGI, and the claim for plain ASGI applications.

    once = Idempotency(pool)
    app = once.keyed(charge, account=who)       # charge(scope, receive, send) works on once.connection(scope)

FastAPI and Starlette place the same edge around a route and claim at the call of its endpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from taptwice.core.model import Answer
from taptwice.core.plan import Flush
from taptwice.core.policy import Policy, changed
from taptwice.errors import Misuse, RequestIncomplete, StoreUnavailable, TaptwiceError
from taptwice.flows.current import current
from taptwice.flows.retention import sweeping
from taptwice.http.driven import Driven, Threads, to_its_end
from taptwice.http.edge import Conclude, Holding, Message, Pass, Reading, messages_of
from taptwice.http.exchange import Exchange, State, refused
from taptwice.http.gate import AsyncGate, gate_key
from taptwice.http.request import NotSaved, RawHeaders, Request
from taptwice.http.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

SCOPE_KEY = "taptwice.exchange"


class Conducted:
    """An exchange, driven on an event loop. `pass_on` lets the next in the gate come."""

    def __init__(self, exchange: Exchange, threads: Threads, pass_on: Callable[[], None]) -> None:
        self.exchange = exchange
        self.pass_on = pass_on
        self._threads = threads
        self._driven: Driven | None = None

    @property
    def handle(self) -> Any:
        """As `Exchange.handle`."""
        return self.exchange.handle

    @property
    def driven(self) -> Driven:
        """The exchange's executor."""
        if self._driven is None:
            blocking = self.exchange.settings.source.blocking
            self._driven = Driven(self.exchange.executor, blocking, self._threads)
        return self._driven

    async def claim(self, account: str | None) -> Answer | None:
        """As `Exchange.claim`; waits without holding a thread or a connection."""
        try:
            driven = self.driven
        except StoreUnavailable as error:  # an origin that is a function may have to connect to be known
            return self.exchange.refusal(error)
        return await driven.drive(self.exchange.claim(account))

    async def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Await a handler that works in a thread."""
        return await to_its_end(self.driven.call(work))

    async def flush(self) -> None:
        """Bring up the errors of what an ORM holds back, where the handler's own would come up."""
        if self.exchange.open and self.exchange.executor.holds_back:
            await self.driven.execute(Flush())

    async def conclude(self, answer: Answer) -> Answer | None:
        """As `Exchange.conclude`. A cancelled request is concluded all the same."""
        try:
            return await self.driven.finish(self.exchange.conclude(answer))
        finally:
            self.pass_on()  # a slow reader or a background task keeps no duplicate waiting
            self.exchange.emit()

    async def abandon(self) -> None:
        """As `Exchange.abandon`. A cancelled request gives its connection back all the same."""
        if self.exchange.begun:
            await self.driven.finish(self.exchange.abandon())


class AsgiSettings(Settings):
    """What the ASGI frameworks' `Idempotency` have in common. `threads`: how many serve a blocking driver."""

    def __init__(self, origin: Any, *, threads: int = 16, **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.gate = AsyncGate()
        self.threads = Threads(threads)

    def sweeping(self, every: float | str = "10m", batch: int = 1000) -> AbstractAsyncContextManager[Any]:
        """Forget old records in the background for the length of an ``async with`` block."""
        return sweeping(self.source, every=every, batch=batch)

    async def serve(
        self,
        app: App,
        policy: Policy,
        route: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        read: bool = False,
    ) -> None:
        """The edge: one request through `app`, whose answer leaves after the commit.

        `read`: the body is wanted even of a request without a key.
        """
        if scope["type"] != "http" or scope["method"] not in policy.methods:
            await app(scope, receive, send)
            return
        if SCOPE_KEY in scope:
            raise Misuse(f"{route} is keyed twice: one edge and one keyed handler serve one request")
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        path, _, _ = raw_path.partition(b"?")
        request = Request(scope["method"], path, route, scope["query_string"], scope["headers"])
        if not (read or request.may_be_keyed(policy)):
            await self._through(app, Exchange(self, policy, request), scope, receive, send)
            return
        try:
            # The body first: a connection that dies while it sends must keep no retry waiting.
            request.body = await read_body(receive, request.headers, policy.request_max_body)
            exchange = Exchange(self, policy, request)
            pass_on = await self._turn(exchange)
        except TaptwiceError as error:
            for message in messages_of(refused(self, policy, request, error)):
                await send(message)
            return
        try:
            await self._through(app, exchange, scope, replaying(request.body, receive), send, pass_on)
        finally:
            pass_on()

    async def _turn(self, exchange: Exchange) -> Callable[[], None]:
        """The key's turn in the gate; what passes it on. Without a key nobody waits."""
        request, key = exchange.request, exchange.current.key
        if key is None:
            return lambda: None
        place = gate_key(request.method, request.path, request.headers, key)
        return await self.gate.turn(place, exchange.policy.wait_s).__aenter__()

    async def _through(
        self,
        app: App,
        exchange: Exchange,
        scope: Scope,
        receive: Receive,
        send: Send,
        pass_on: Callable[[], None] = lambda: None,
    ) -> None:
        conducted = Conducted(exchange, self.threads, pass_on)
        outgoing = Outgoing(conducted, send)
        token = current.set(exchange.current)
        # No copy: middleware outside reads what is left in it, such as the request's state.
        scope[SCOPE_KEY] = conducted
        try:
            await app(scope, receive, outgoing)
            outgoing.check()
        except BaseException as error:
            if not await outgoing.recover(error):
                raise
        finally:
            del scope[SCOPE_KEY]
            current.reset(token)
            if exchange.state is not State.OVER:
                await conducted.abandon()  # it ended without an answer, or was cancelled at the claim
            exchange.emit()


class Replaced(Exception):
    """Raised into an application whose answer was not committed; another went out in its place."""


class Outgoing:
    """The `send` that a keyed application gets."""

    def __init__(self, conducted: Conducted, send: Send) -> None:
        self._conducted = conducted
        self._send = send
        self._holding: Holding | None = None
        self._replaced = False
        self._started = False
        self._failure: BaseException | None = None

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return  # our answer went out in place of this one
        exchange = self._conducted.exchange
        if self._holding is None:
            if not exchange.open:
                self._conducted.pass_on()  # an answer without a claim: a replay, or a refusal of whoever's
                await self._pass((message,))
                return
            self._holding = Holding(exchange.policy)
        match self._holding.feed(message):
            case Pass(messages):
                await self._pass(messages)
            case Conclude(answer, messages):
                await self._conclude(answer, messages)
                if self._replaced:
                    raise Replaced  # its background tasks belong to work that was undone

    async def _conclude(self, answer: Answer, messages: tuple[Message, ...]) -> None:
        try:
            instead = await self._conducted.conclude(answer)
        except BaseException as error:
            self._failure = error
            raise
        if instead is not None:
            self._replaced = True
            messages = messages_of(instead)
        await self._pass(messages)

    async def _pass(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            self._started = self._started or message["type"] == "http.response.start"
            await self._send(message)

    def check(self) -> None:
        """The application has returned. Raises what was raised into it, if it told nobody."""
        if self._failure is not None and not self._started:
            raise self._failure

    async def recover(self, error: BaseException) -> bool:
        """The application failed. True when an answer was sent all the same; else the error is to go on."""
        if isinstance(error, Replaced):
            return True
        if self._failure is not None and not self._started and error is not self._failure:
            # Raised from inside the application's send it was taken for something else on its way out.
            raise self._failure from None
        exchange = self._conducted.exchange
        if not exchange.open:
            return False
        answer = exchange.unhandled(error)
        if answer is not None:
            await self._conclude(answer, messages_of(answer))
            return True
        await self._conducted.abandon()
        return False


async def read_body(receive: Receive, headers: RawHeaders, limit: int) -> bytes:
    """The whole body. Raises `RequestTooLarge`, and `RequestIncomplete` when it ends too early."""
    reading = Reading(headers, limit)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestIncomplete
        reading.feed(message.get("body", b""))
        if not message.get("more_body", False):
            return reading.end()


def replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body again that was read, and then goes on as before."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def conducted_in(scope: Scope) -> Conducted:
    """The exchange that the edge around this route opened. Raises `Misuse` where there is no edge."""
    found: Conducted | None = scope.get(SCOPE_KEY)
    if found is None:
        raise Misuse(
            f"{scope.get('method', '')} {scope.get('path', '')} is marked as keyed, with no edge around it: "
            "in FastAPI use APIRouter(route_class=IdempotentRoute), in Starlette "
            "Route(…, middleware=[Middleware(once.Edge)])"
        )
    return found


class Idempotency(AsgiSettings):
    """Idempotency for plain ASGI applications."""

    def keyed(
        self,
        app: App,
        *,
        account: Callable[[Scope], str | Awaitable[str | None] | None],
        parse: Callable[[bytes], Any] | None = None,
        **changes: Any,
    ) -> App:
        """The application, keyed. `account` says whose request it is; `parse` may refuse a body before the
        claim: it raises `NotSaved` with an `Answer`. Other settings are those of `Policy`.
        """
        policy = changed(self.policy, **changes)

        async def claimed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] not in policy.methods:
                await app(scope, receive, send)
                return
            conducted = conducted_in(scope)
            try:
                whose = account(scope)
                if inspect.isawaitable(whose):
                    whose = await whose
                if parse is not None:
                    parse(conducted.exchange.request.body)
                answer = await conducted.claim(whose)
                if answer is None:
                    await app(scope, receive, send)
                    return
            except NotSaved as unsaved:
                if conducted.exchange.state is State.OVER:
                    raise  # too late: an answer is out
                conducted.exchange.not_saved = True
                answer = unsaved.answer
            for message in messages_of(answer):
                await send(message)

        async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
            reads = parse is not None
            await self.serve(claimed, policy, scope.get("path", ""), scope, receive, send, reads)

        return keyed

    @staticmethod
    def connection(scope: Scope) -> Any:
        """The connection of the claim."""
        return conducted_in(scope).handle
