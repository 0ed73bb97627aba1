"""The edge for ASGI, and the claim for plain ASGI applications.

    once = Idempotency(pool)
    app = once.keyed(charge, account=who)       # charge(scope, receive, send) works on once.connection(scope)

FastAPI and Starlette place the same edge around a route and claim at the call of its endpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from taptwice.core.model import Answer
from taptwice.core.plan import Command, Flush, Now, Plan, Sleep, arun, run
from taptwice.core.policy import Policy, changed
from taptwice.drivers import system
from taptwice.errors import Misuse, RequestIncomplete, RequestTooLarge, TaptwiceError
from taptwice.events import logger
from taptwice.flows.current import current
from taptwice.flows.retention import sweeping
from taptwice.http.edge import Conclude, Holding, Message, Pass, messages_of
from taptwice.http.exchange import Exchange, NotSaved, Request, Settings
from taptwice.http.gate import AsyncGate, gate_key

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

SCOPE_KEY = "taptwice.exchange"


class Conducted:
    """An exchange, driven on an event loop."""

    def __init__(self, exchange: Exchange, threads: Threads) -> None:
        self.exchange = exchange
        self._threads = threads
        self._busy: asyncio.Future[Any] | None = None

    @property
    def handle(self) -> Any:
        """What the handler works on. Raises `Misuse` outside the claim."""
        if not self.exchange.open:
            raise Misuse(
                "the claim's connection is used outside the keyed handler: before the claim (a login should read "
                "through a connection of its own) or after the answer"
            )
        return self.exchange.executor.handle

    async def claim(self, account: str | None) -> Answer | None:
        """As `Exchange.claim`; waits without holding a thread or a connection."""
        return await arun(self.exchange.claim(account), self._execute)

    async def flush(self) -> None:
        """Bring up the errors of what an ORM holds back, where the handler's own would come up."""
        if self.exchange.open:
            await self._execute(Flush())

    async def conclude(self, answer: Answer) -> Answer | None:
        """As `Exchange.conclude`. A cancelled request is concluded all the same."""
        return await self._finish(self.exchange.conclude(answer))

    async def abandon(self) -> None:
        """As `Exchange.abandon`. A cancelled request gives its connection back all the same."""
        if self.exchange.executor is not None:
            await self._finish(self.exchange.abandon())

    async def _finish(self, plan: Plan[Result]) -> Result:
        # In a task of its own: whoever cancels the request, however often, does not interrupt this.
        return await asyncio.shield(asyncio.ensure_future(self._run(plan)))

    async def _run(self, plan: Plan[Result]) -> Result:
        if not self.exchange.settings.source.blocking:
            return await arun(plan, self._execute)
        if self._busy is not None:
            await asyncio.wait([self._busy])  # a thread cannot be cancelled: let it come to its end first
        return await self._threads.run(run, plan, self.exchange.executor.execute)

    async def _execute(self, command: Command[Any]) -> Any:
        executor = self.exchange.executor
        if not self.exchange.settings.source.blocking:
            return await executor.execute(command)
        if isinstance(command, Now):
            return system.now()
        if isinstance(command, Sleep):
            return await system.asleep(command.seconds)
        self._busy = asyncio.ensure_future(self._threads.run(executor.execute, command))
        return await asyncio.shield(self._busy)


class Threads:
    """Threads of our own for blocking drivers: the handlers may use up all of the framework's."""

    def __init__(self, number: int) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix="taptwice")

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: context.run(call, *arguments))


class AsgiSettings(Settings):
    """What the ASGI frameworks' `Idempotency` have in common. `threads` serve a blocking driver's statements."""

    def __init__(self, origin: Any, *, threads: int = 16, **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.gate = AsyncGate()
        self.threads = Threads(threads)

    def sweeping(self, every: float | str = "10m", batch: int = 1000) -> AbstractAsyncContextManager[None]:
        """Forget old records in the background for the length of an ``async with`` block."""
        return sweeping(self.source, every=every, batch=batch)

    async def serve(
        self, app: App, policy: Policy, route: str, scope: Scope, receive: Receive, send: Send, read: bool = False
    ) -> None:
        """The edge: one request through `app`, whose answer leaves after the commit.

        `read`: the body is wanted even of a request without a key.
        """
        if scope["type"] != "http" or scope["method"] not in policy.methods:
            await app(scope, receive, send)
            return
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        headers = tuple(scope["headers"])
        request = Request(scope["method"], raw_path.partition(b"?")[0], route, scope["query_string"], headers)
        keyed = read or policy.key_pointer is not None or any(request.has(name) for name in policy.key.names)
        if not keyed:
            await self._through(app, Exchange(self, policy, request), scope, receive, send)
            return
        key = gate_key(request.method, request.path, headers, policy.key.names)
        try:
            async with self.gate.turn(key, policy.wait_s):
                request = Request(
                    request.method,
                    request.path,
                    route,
                    request.query,
                    headers,
                    await read_body(receive, headers, policy.request_max_body),
                )
                exchange = Exchange(self, policy, request)
                await self._through(app, exchange, scope, replaying(request.body, receive), send)
        except TaptwiceError as error:
            if isinstance(error, Misuse):
                raise
            exchange = Exchange(self, policy, request)
            answer = exchange.refusal(error)
            exchange.emit()
            for message in messages_of(answer):
                await send(message)

    async def _through(self, app: App, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        conducted = Conducted(exchange, self.threads)
        outgoing = Outgoing(conducted, send)
        token = current.set(exchange.current)
        try:
            await app({**scope, SCOPE_KEY: conducted}, receive, outgoing)
        except BaseException as error:
            if not await outgoing.recover(error):
                raise
        finally:
            current.reset(token)
            if exchange.open:
                await conducted.abandon()  # the application ended without an answer
            exchange.emit()


class Outgoing:
    """The `send` that a keyed application gets."""

    def __init__(self, conducted: Conducted, send: Send) -> None:
        self._conducted = conducted
        self._send = send
        self._holding: Holding | None = None
        self._replaced = False
        self._failure: BaseException | None = None

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return  # our answer went out in place of this one
        if self._holding is None:
            if not self._conducted.exchange.open:
                await self._send(message)
                return
            self._holding = Holding(self._conducted.exchange.policy)
        match self._holding.feed(message):
            case Pass(messages):
                await self._send_all(messages)
            case Conclude(answer, messages, _):
                await self._conclude(answer, messages)

    async def _conclude(self, answer: Answer, messages: tuple[Message, ...]) -> None:
        exchange = self._conducted.exchange
        try:
            instead = await self._conducted.conclude(answer)
        except BaseException as error:
            # Raised from inside the application's send it may be taken for something else on its way out.
            self._failure = error
            raise
        exchange.emit()
        if instead is not None:
            self._replaced = True
            messages = messages_of(instead)
        await self._send_all(messages)

    async def _send_all(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            await self._send(message)

    async def recover(self, error: BaseException) -> bool:
        """The application failed. True when its answer is sent all the same; else the error is to go on."""
        if self._failure is not None:
            if error is not self._failure:
                raise self._failure from None
            return False
        exchange = self._conducted.exchange
        if not exchange.open:
            return False
        if isinstance(error, Exception) and exchange.policy.save == "all-after-start":
            logger.error("unhandled error in %s", exchange.request.route, exc_info=error)
            exchange.raised = True
            answer = exchange.unhandled()
            await self._conclude(answer, messages_of(answer))
            return True
        await self._conducted.abandon()
        return False


async def read_body(receive: Receive, headers: tuple[tuple[bytes, bytes], ...], limit: int) -> bytes:
    """The whole body. Raises `RequestTooLarge`, and `RequestIncomplete` when the client left before its end."""
    too_large = RequestTooLarge(f"The request body is larger than {limit} bytes.")
    announced = next((value for name, value in headers if name.lower() == b"content-length"), b"")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestIncomplete
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


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
            f"{scope.get('method', '')} {scope.get('path', '')} is marked as keyed, and no edge is around it: in FastAPI "
            "use APIRouter(route_class=IdempotentRoute), in Starlette Route(…, middleware=[Middleware(once.Edge)])"
        )
    return found


class Idempotency(AsgiSettings):
    """Idempotency for plain ASGI applications."""

    def keyed(
        self,
        app: App,
        *,
        account: Callable[[Scope], str | None | Awaitable[str | None]],
        parse: Callable[[bytes], Any] | None = None,
        **changes: Any,
    ) -> App:
        """The application, keyed. `account` says whose request it is; `parse` may refuse a body before the claim:
        it raises `NotSaved` with an `Answer`. Other settings are those of `Policy`.
        """
        policy = changed(self.policy, **changes)

        async def claimed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] not in policy.methods:
                await app(scope, receive, send)
                return
            conducted = conducted_in(scope)
            try:
                whose = account(scope)
                if parse is not None:
                    parse(conducted.exchange.request.body)
                answer = await conducted.claim(await whose if inspect.isawaitable(whose) else whose)
                if answer is None:
                    await app(scope, receive, send)
                    return
            except NotSaved as refused:
                conducted.exchange.not_saved = True
                answer = refused.answer
            for message in messages_of(answer):
                await send(message)

        async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serve(claimed, policy, scope.get("path", ""), scope, receive, send, read=parse is not None)

        return keyed

    @staticmethod
    def connection(scope: Scope) -> Any:
        """The connection of the claim."""
        return conducted_in(scope).handle
