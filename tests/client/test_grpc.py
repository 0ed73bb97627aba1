"""The interceptors for gRPC and grpc.aio, each against a server of its own kind that answers by a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from taptwice.client.grpc import AsyncRetryInterceptor, RetryInterceptor
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Ended, Report, report
from taptwice.client.testing import no_wait
from taptwice.client.world import World
from taptwice.core.breaker import CircuitBreaker
from taptwice.errors import CircuitOpen

METHOD = "/shop.Charges/Make"
OPTIONS = [("grpc.enable_retries", 0)]
Code = grpc.StatusCode


@dataclass(frozen=True)
class Step:
    """What a call meets."""

    code: Any = None
    pushback: str | None = None
    hangs: bool = False

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        return () if self.pushback is None else (("grpc-retry-pushback-ms", self.pushback),)


def fails(code: Any, pushback: str | None = None) -> Step:
    return Step(code, pushback)


done = Step()


class Server:
    """Step k of the script answers call k, and the last one repeats."""

    def __init__(self) -> None:
        self.script: list[Step] = [done]
        self.metadata: list[dict[str, str]] = []
        self.remaining: list[float] = []
        self.port = 0

    def next_step(self, context: Any) -> Step:
        step = self.script[min(len(self.metadata), len(self.script) - 1)]
        self.metadata.append({name: str(value) for name, value in context.invocation_metadata()})
        self.remaining.append(context.time_remaining())
        return step

    def call(
        self,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
        **settings: Any,
    ) -> tuple[bytes, Report]:
        """The call's result, and the report that the listeners got."""
        heard: list[Any] = []
        result = self.made(METHOD, timeout, metadata, policy=policy, listeners=[heard.append], **settings)
        [found] = [event.report for event in heard if isinstance(event, Ended)]
        return result, found

    def made(self, method: str, timeout: float | None, metadata: Any, **settings: Any) -> bytes:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class Blocking(Server):
    def __init__(self) -> None:
        super().__init__()
        self._release = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((Handlers(self.answer),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def answer(self, request: bytes, context: Any) -> bytes:
        step = self.next_step(context)
        if step.hangs:
            self._release.wait(30)
        context.set_trailing_metadata(step.trailing)
        if step.code is not None:
            context.abort(step.code, "by the script")
        return b"done"

    def made(self, method: str, timeout: float | None, metadata: Any, **settings: Any) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", OPTIONS) as channel:
            intercepted = grpc.intercept_channel(channel, RetryInterceptor(**settings))
            stub = intercepted.unary_unary(method)
            result: bytes
            result, call = stub.with_call(b"", timeout=timeout, metadata=metadata)
            assert call.code() is Code.OK
            assert report(call).attempts[-1].error is None
            return result

    def stop(self) -> None:
        self._release.set()
        self._server.stop(0).wait()


class Awaiting(Server):
    """The server and its client are on one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.told: tuple[Any, str] | None = None
        """What the last call said of itself, apart from what it raised."""
        self.hanging, self.given_up = asyncio.Event(), asyncio.Event()
        self.runner = asyncio.Runner()
        self.runner.run(self._start())

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((Handlers(self.answer),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def answer(self, request: bytes, context: Any) -> bytes:
        step = self.next_step(context)
        if step.hangs:
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        context.set_trailing_metadata(step.trailing)
        if step.code is not None:
            await context.abort(step.code, "by the script")
        return b"done"

    def made(self, method: str, timeout: float | None, metadata: Any, **settings: Any) -> bytes:
        return self.runner.run(self.amade(method, timeout, metadata, **settings))

    async def amade(self, method: str, timeout: float | None, metadata: Any, **settings: Any) -> bytes:
        interceptors = [AsyncRetryInterceptor(**settings), OneMore()]
        target = f"127.0.0.1:{self.port}"
        async with grpc.aio.insecure_channel(target, OPTIONS, interceptors=interceptors) as channel:
            call = channel.unary_unary(method)(b"", timeout=timeout, metadata=metadata)
            try:
                result: bytes = await call
            finally:
                self.told = await call.code(), await call.details()
            return result

    def stop(self) -> None:
        self.runner.run(self._server.stop(0))
        self.runner.close()


class OneMore(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Another interceptor, beneath ours; it works on the metadata as grpc.aio's own do."""

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        details.metadata.add("one-more", "yes")
        return await continuation(details, request)


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answer: Any) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, details: Any) -> Any:
        return self._handler


@pytest.fixture(params=[Blocking, Awaiting], ids=["grpc", "grpc.aio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made: Server = request.param()
    yield made
    made.stop()


@pytest.fixture
def awaiting() -> Iterator[Awaiting]:
    made = Awaiting()
    yield made
    made.stop()


def keys(server: Server) -> list[str | None]:
    return [metadata.get("idempotency-key") for metadata in server.metadata]


def test_a_call_that_goes_well(server: Server) -> None:
    result, found = server.call()
    assert (result, len(found.attempts)) == (b"done", 1)
    assert [found.idempotency_key] == keys(server)


def test_ones_own_key_goes_as_it_is(server: Server) -> None:
    server.script = [fails(Code.UNAVAILABLE), done]
    with no_wait():
        _, found = server.call(metadata=(("idempotency-key", "mine"), ("other", "too")))
    assert found.idempotency_key == "mine"
    assert keys(server) == ["mine", "mine"]
    assert [metadata["other"] for metadata in server.metadata] == ["too", "too"]


@pytest.mark.parametrize(
    ("step", "attempts"),
    [
        (fails(Code.UNAVAILABLE), 2),
        (fails(Code.INTERNAL), 2),
        (fails(Code.UNKNOWN), 2),
        (fails(Code.RESOURCE_EXHAUSTED, "1"), 2),
        (fails(Code.RESOURCE_EXHAUSTED), 1),
        (fails(Code.ABORTED), 1),
        (fails(Code.INVALID_ARGUMENT), 1),
        (fails(Code.NOT_FOUND), 1),
        (fails(Code.ALREADY_EXISTS), 1),
        (fails(Code.FAILED_PRECONDITION), 1),
        (fails(Code.PERMISSION_DENIED), 1),
        (fails(Code.UNIMPLEMENTED), 1),
        (fails(Code.DATA_LOSS), 1),
    ],
)
def test_s142_the_codes_that_are_tried_again(server: Server, step: Step, attempts: int) -> None:
    server.script = [step, done]
    with no_wait():
        if attempts == 2:
            assert server.call()[0] == b"done"
        else:
            with pytest.raises(grpc.RpcError) as caught:
                server.call()
            assert len(report(caught.value).attempts) == 1
    assert len(server.metadata) == attempts
    assert len(set(keys(server))) == 1
    assert [metadata.get("grpc-previous-rpc-attempts") for metadata in server.metadata] == [None, "1"][
        :attempts
    ]


def test_without_a_key_nothing_is_sent_twice(server: Server) -> None:
    server.script = [fails(Code.UNAVAILABLE), done]
    policy = RetryPolicy(auto_key=False)
    with no_wait():
        with pytest.raises(grpc.RpcError) as caught:
            server.call(policy)
        assert report(caught.value).stop_reason is StopReason.UNKNOWN_OUTCOME
        server.metadata.clear()
        assert server.call(policy, idempotent=lambda method: method == METHOD)[0] == b"done"


def test_t44_pushback(server: Server) -> None:
    server.script = [fails(Code.UNAVAILABLE, "-1"), done]
    with no_wait() as waits, pytest.raises(grpc.RpcError) as caught:
        server.call()
    assert report(caught.value).stop_reason is StopReason.SERVER_SAYS_NO
    assert (len(server.metadata), waits) == (1, [])
    server.metadata.clear()
    server.script = [fails(Code.UNAVAILABLE, "500"), done]
    with no_wait() as waits:
        server.call()
    assert 0.5 <= waits[0] <= 0.55


def test_the_remaining_time_goes_along_and_ones_own_timeout_counts(server: Server) -> None:
    server.script = [fails(Code.UNAVAILABLE, "500"), done]
    with no_wait():
        server.call(RetryPolicy(deadline=2.0, per_try=None))
        server.call(timeout=1.0)
    # gRPC rounds what it sends up by a little.
    assert 1.0 < server.remaining[0] < 2.1
    assert server.remaining[1] < 1.6
    assert server.remaining[2] < 1.1


def test_a_server_that_hangs(server: Server) -> None:
    server.script = [Step(hangs=True)]
    with pytest.raises(grpc.RpcError) as caught:
        server.call(RetryPolicy(deadline=0.2))
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    found = report(caught.value)
    assert (found.outcome, found.stop_reason) == (Outcome.UNKNOWN, StopReason.DEADLINE)


def test_nobody_listens(server: Server) -> None:
    server.port = 1
    with no_wait(), pytest.raises(grpc.RpcError) as caught:
        server.call(RetryPolicy(auto_key=False))
    assert (report(caught.value).outcome, len(report(caught.value).attempts)) == (Outcome.NOT_SENT, 5)


def test_an_open_circuit(server: Server) -> None:
    server.script = [fails(Code.UNAVAILABLE)]
    breaker = CircuitBreaker(failures=1)
    with no_wait():
        for kind in (grpc.RpcError, CircuitOpen):
            with pytest.raises(kind) as caught:
                server.call(breaker=lambda: breaker)
            assert caught.value.code() is Code.UNAVAILABLE
            said = "by the script" if kind is grpc.RpcError else f"the circuit for {METHOD} is open"
            assert said in caught.value.details()
    assert len(server.metadata) == 1


def test_cancelled_in_a_wait_no_further_call(awaiting: Awaiting) -> None:
    awaiting.script = [fails(Code.UNAVAILABLE, "60000"), done]

    async def main() -> None:
        waiting = asyncio.Event()

        async def asleep(seconds: float) -> None:
            waiting.set()
            await asyncio.Event().wait()

        settings: dict[str, Any] = {"policy": RetryPolicy(deadline=None), "world": World(asleep=asleep)}
        task = asyncio.create_task(awaiting.amade(METHOD, None, (), **settings))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    awaiting.runner.run(main())
    assert len(awaiting.metadata) == 1


def test_cancelled_in_an_attempt_the_server_hears_of_it(awaiting: Awaiting) -> None:
    awaiting.script = [Step(hangs=True)]

    async def main() -> None:
        task = asyncio.create_task(awaiting.amade(METHOD, None, ()))
        await awaiting.hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await awaiting.given_up.wait()

    awaiting.runner.run(main())
    assert len(awaiting.metadata) == 1


def test_a_call_says_of_itself_what_it_raises(awaiting: Awaiting) -> None:
    breaker = CircuitBreaker(failures=1)
    awaiting.script = [fails(Code.UNAVAILABLE)]
    for said in ("by the script", f"the circuit for {METHOD} is open"):
        with no_wait(), pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
            awaiting.call(breaker=lambda: breaker)
        assert awaiting.told == (caught.value.code(), caught.value.details())
    assert len(awaiting.metadata) == 1
