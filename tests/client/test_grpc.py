"""The interceptor for gRPC, against a server that answers by a script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from taptwice.client.grpc import RetryInterceptor
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import report
from taptwice.client.testing import no_wait
from taptwice.core.breaker import CircuitBreaker
from taptwice.errors import CircuitOpen

Step = Callable[[Any], bytes]
METHOD = "/shop.Charges/Make"
Code = grpc.StatusCode


def fails(code: Any, pushback: str | None = None) -> Step:
    def step(context: Any) -> bytes:
        if pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
        context.abort(code, "by the script")
        raise AssertionError

    return step


def done(context: Any) -> bytes:
    return b"done"


class Server:
    """Step k of the script answers call k, and the last one repeats."""

    def __init__(self) -> None:
        self.script: list[Step] = [done]
        self.metadata: list[dict[str, str]] = []
        self.remaining: list[float] = []
        self.release = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((Handlers(self.answer),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def answer(self, request: bytes, context: Any) -> bytes:
        step = self.script[min(len(self.metadata), len(self.script) - 1)]
        self.metadata.append({name: str(value) for name, value in context.invocation_metadata()})
        self.remaining.append(context.time_remaining())
        return step(context)

    def call(self, policy: RetryPolicy = RetryPolicy(), timeout: float | None = None, **settings: Any) -> Any:  # noqa: B008
        """The call's result, and the call."""
        options = [("grpc.enable_retries", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            intercepted = grpc.intercept_channel(channel, RetryInterceptor(policy, **settings))
            return intercepted.unary_unary(METHOD).with_call(b"", timeout=timeout)

    def stop(self) -> None:
        self.release.set()
        self._server.stop(0).wait()


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answer: Any) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, details: Any) -> Any:
        return self._handler


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def keys(server: Server) -> list[str | None]:
    return [metadata.get("idempotency-key") for metadata in server.metadata]


def test_a_call_that_goes_well(server: Server) -> None:
    result, call = server.call()
    assert (result, call.code()) == (b"done", Code.OK)
    assert report(call).idempotency_key == keys(server)[0]


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
    def hang(context: Any) -> bytes:
        server.release.wait(30)
        return b""

    server.script = [hang]
    with pytest.raises(grpc.RpcError) as caught:
        server.call(RetryPolicy(deadline=0.2))
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    found = report(caught.value)
    assert (found.outcome, found.stop_reason) == (Outcome.UNKNOWN, StopReason.DEADLINE)


def test_nobody_listens() -> None:
    options = [("grpc.enable_retries", 0)]
    with no_wait(), grpc.insecure_channel("127.0.0.1:1", options=options) as channel:
        intercepted = grpc.intercept_channel(channel, RetryInterceptor(RetryPolicy(auto_key=False)))
        with pytest.raises(grpc.RpcError) as caught:
            intercepted.unary_unary(METHOD)(b"")
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
