"""An adapter that retries, for a session of requests that one has already.

    session = requests.Session()
    session.mount("https://", RetryAdapter(policy))

It knows whether its caller streams and reads the body inside the attempt if not. It raises exceptions of
requests only. A redirect is a call of its own, with a deadline of its own: the session follows it, above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from taptwice.client.errors import DeadlineExceeded, kin, missing
from taptwice.client.gate import Gates, MakeBreaker, MakeBudget
from taptwice.client.keys import new_key
from taptwice.client.limits import Limit, Until, addresses_of, left
from taptwice.client.outcome import Outcome, Seen, of_answer, of_error
from taptwice.client.plan import Call, StopReason
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener, attach
from taptwice.client.settings import check
from taptwice.client.shell import Going
from taptwice.client.sockets import LimitedSocket, WholeHead
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.core.header import format_key
from taptwice.errors import CircuitOpen, Misuse

try:
    from requests import PreparedRequest, Response, exceptions
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
    from urllib3.util import Timeout
except ModuleNotFoundError:
    raise missing("requests", "requests") from None

__all__ = ["RetryAdapter"]


class RetryAdapter(HTTPAdapter):
    """Retries beneath ``requests.Session``."""

    def __init__(
        self,
        policy: RetryPolicy = DEFAULT,
        *,
        budget: MakeBudget = RetryBudget,
        breaker: MakeBreaker = None,
        listeners: Sequence[Listener] = (),
        world: World = REAL,
        **settings: Any,
    ) -> None:
        """`settings` are those of requests' own adapter: `pool_connections`, `pool_maxsize`, `pool_block`."""
        if settings.get("max_retries"):
            raise Misuse("max_retries=…: urllib3's retries would multiply with ours, so set it to 0")
        check(policy, listeners, world)
        self._policy = policy
        self._gates = Gates(budget, breaker)
        self._listeners = listeners
        self._world = world
        super().__init__(**settings)

    def init_poolmanager(self, *arguments: Any, **settings: Any) -> None:
        """requests' own hook: here the connections become ours."""
        super().init_poolmanager(*arguments, **settings)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, proxy: str, **settings: Any) -> PoolManager:
        """requests' own hook, the same for proxies."""
        manager: PoolManager = super().proxy_manager_for(proxy, **settings)
        if not proxy.lower().startswith("socks"):  # whose connections are of a kind of their own
            manager.pool_classes_by_scheme = POOLS
        return manager

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Make one call of the session's."""
        going = self._going(request)
        body: Any = request.body
        start = body.tell() if hasattr(body, "tell") and hasattr(body, "seek") else None
        replayable = start is not None or body is None or isinstance(body, bytes | str)
        going.call.replayable = replayable
        connect, read = _phases(timeout)
        deliver = super().send

        def attempt(limit: Limit) -> Seen:
            repeats = len(going.call.attempts)
            if repeats and start is not None:
                body.seek(start)
            going.stamp(limit, request.headers)
            response = None
            try:
                times = limit.until(connect), limit.until(read)
                response = deliver(request, True, times, verify, cert, proxies)
                if stream and response.status_code < 400:
                    limit.end = going.call.end
                else:
                    _ = response.content
            except (exceptions.RequestException, OSError) as error:
                if response is not None:
                    response.close()
                return of_error(error, response is not None, limit.wrote)
            return _judged(going, response)

        return _concluded(going, going.run(attempt), request)

    def _going(self, request: PreparedRequest) -> Going:
        policy = self._policy
        key = request.headers.get(policy.key_header)
        if key is None and policy.auto_key and request.method in ("POST", "PATCH"):
            key = new_key()
            request.headers[policy.key_header] = format_key(key, policy.key_quoting == "sf-string")
        elif isinstance(key, bytes):
            key = key.decode("latin-1")
        target = urlsplit(request.url or "")
        origin = f"{target.scheme}://{target.netloc.rpartition('@')[2]}"
        call = Call(policy, self._world.clock(), method=request.method or "GET", key=key)
        return Going(call, self._gates[origin], self._world, self._listeners, origin)


def _judged(going: Going, response: Response) -> Seen:
    status = response.status_code
    if status < 400:
        return Seen(Outcome.PROCESSED, status, response)
    headers: Mapping[str, str] = response.headers
    return of_answer(going.call.policy, response, status, headers.get, lambda: response.content)


def _concluded(going: Going, seen: Seen, request: PreparedRequest) -> Response:
    report = going.report(seen)
    if seen.error is None:
        answer: Response = seen.answer
        answer.taptwice = report  # type: ignore[attr-defined]
        return answer
    error: Exception = seen.error
    if isinstance(error, CircuitOpen):
        refused = kin(CircuitOpen, exceptions.ConnectionError)
        error = refused(error.retry_after, error.origin, request=request, response=None)
    elif going.cut and report.stop_reason is StopReason.DEADLINE:
        late = kin(DeadlineExceeded, exceptions.Timeout)(going.too_late(seen), request=request, response=None)
        attach(late, report)
        raise late from error
    attach(error, report)
    raise error


def _phases(timeout: Any) -> tuple[float | None, float | None]:
    """Seconds to connect, and for one read, of what requests takes as a timeout."""
    if isinstance(timeout, Timeout):
        return timeout.connect_timeout, timeout.read_timeout  # type: ignore[return-value]
    if isinstance(timeout, tuple):
        connect, read = timeout
        return connect, read
    return timeout, timeout


class _Limited:
    """A connection of urllib3's whose socket heeds an `Until`."""

    host: str
    port: int
    sock: Any
    timeout: Any
    _dns_host: str

    def _new_conn(self) -> Any:
        # urllib3 gives each address of a host the whole timeout; here they share it.
        connect = super()._new_conn  # type: ignore[misc]
        until, host = self.timeout, self._dns_host
        try:
            addresses = addresses_of(host, self.port) if isinstance(until, Until) else []
        except (OSError, UnicodeError):
            addresses = []  # it fails below too, and is said in the library's words there
        if len(addresses) < 2:
            return connect()
        try:
            for place, address in enumerate(addresses[:-1]):
                self._dns_host = address
                self.timeout = left(until, ConnectTimeoutError) / (len(addresses) - place)
                try:
                    return connect()
                except (ConnectTimeoutError, NewConnectionError):
                    pass
            self._dns_host, self.timeout = addresses[-1], left(until, ConnectTimeoutError)
            return connect()
        finally:
            self._dns_host, self.timeout = host, until

    def connect(self) -> None:
        if isinstance(self.timeout, Until):
            self.timeout.limit.connecting()
        super().connect()  # type: ignore[misc]
        self.sock = LimitedSocket(self.sock, self.timeout)


class _Connection(_Limited, HTTPConnection):
    response_class = WholeHead


class _SecureConnection(_Limited, HTTPSConnection):
    response_class = WholeHead


class LimitedHTTPConnectionPool(HTTPConnectionPool):
    ConnectionCls = _Connection


class LimitedHTTPSConnectionPool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


POOLS = {"http": LimitedHTTPConnectionPool, "https": LimitedHTTPSConnectionPool}
