"""The edge for WSGI, and the claim for plain WSGI applications.

    once = Idempotency(pool)
    app = once.keyed(charge, account=who)   # charge(environ, start_response) has once.connection(environ)

A WSGI server joins header lines of one name with commas. A key that was sent twice is refused all the same,
because a key with a comma in it must be quoted.
"""

from __future__ import annotations

import http.client
import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from taptwice.core.model import Answer
from taptwice.core.plan import Command, Flush, Plan, Sleep, run
from taptwice.core.policy import Policy, changed
from taptwice.drivers import Source
from taptwice.errors import InFlight, Misuse, RequestError, RequestIncomplete
from taptwice.flows.current import current
from taptwice.flows.retention import Sweeping, sweeping
from taptwice.http.edge import BODILESS, Conclude, Hold, Holding, Message, Reading, messages_of
from taptwice.http.exchange import Exchange, State, refused
from taptwice.http.gate import ThreadGate, gate_key
from taptwice.http.request import NotSaved, Request
from taptwice.http.settings import Settings

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
Reply = TypeVar("Reply")
Result = TypeVar("Result")

ENVIRON_KEY = "taptwice.exchange"
START, BODY = "http.response.start", "http.response.body"
CHUNK = 65_536


class Conducted:
    """An exchange, driven by a thread that waits."""

    def __init__(self, exchange: Exchange, gate: ThreadGate) -> None:
        self.exchange = exchange
        self._gate = gate
        self._place = ExitStack()
        self._waits = False

    @property
    def handle(self) -> Any:
        """As `Exchange.handle`."""
        return self.exchange.handle

    def claim(self, account: str | None) -> Answer | None:
        """As `Exchange.claim`; waits without holding a connection."""
        with self._place:
            return self._run(self.exchange.claim(account))

    def flush(self) -> None:
        """Bring up the errors of what an ORM holds back, where the handler's own would come up."""
        if self.exchange.open and self.exchange.executor.holds_back:
            self._execute(Flush())

    def conclude(self, answer: Answer) -> Answer | None:
        """As `Exchange.conclude`."""
        try:
            return self._run(self.exchange.conclude(answer))
        finally:
            self.exchange.emit()

    def failed(self, error: BaseException) -> Answer | None:
        """The handler failed: undo its work. An answer: send it. None: the error is to go on."""
        if not self.exchange.open:
            return None
        answer = self.exchange.unhandled(error)
        if answer is None:
            self.abandon()
            return None
        return self.conclude(answer) or answer

    def abandon(self) -> None:
        """As `Exchange.abandon`."""
        if self.exchange.begun:
            self._run(self.exchange.abandon())

    def _run(self, plan: Plan[Result]) -> Result:
        return run(plan, self._execute)

    def _execute(self, command: Command[Reply]) -> Reply:
        executor = self.exchange.executor
        if isinstance(command, Sleep) and executor.dialect != "sqlite" and not self._waits:
            # Another process has the key. (On SQLite any key waits, for the right to write.)
            self._place.enter_context(self._gate.waiting())
            self._waits = True
        reply: Reply = executor.execute(command)
        return reply


class WsgiSettings(Settings):
    """What the WSGI frameworks' `Idempotency` have in common.

    `threads`: how many the server has in a process (gunicorn's ``--threads``). Half of them may wait for a
    first attempt; a duplicate beyond that is told at once that the first is in progress. With one thread
    nobody waits.
    """

    def __init__(self, origin: Any, *, threads: int = 8, **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.gate = ThreadGate(threads)

    @property
    def source(self) -> Source:
        """Where connections come from: they must block, as the server does."""
        return self.checked(super().source)

    @staticmethod
    def checked(found: Source) -> Source:
        """The same, if it is one for WSGI. Raises `Misuse`."""
        if not found.blocking:
            raise Misuse("WSGI has no event loop: give an engine, pool or function whose connections block")
        if hasattr(found, "engine"):
            from taptwice.http.joined import watch  # SQLAlchemy is an extra

            watch(found.engine)
        return found

    def sweeping(self, every: float | str = "10m", batch: int = 1000) -> Sweeping:
        """Forget old records in the background for the length of a ``with`` block."""
        return sweeping(self.source, every=every, batch=batch)

    def serve(
        self,
        policy: Policy,
        request: Request,
        environ: Environ,
        read: Callable[[], bytes],
        work: Callable[[Conducted], Result],
        answered: Callable[[Answer], Result],
        always: bool = False,
    ) -> Result:
        """The edge: one request through `work`. `answered` makes an answer of ours into what `work` gives.

        `always`: the body is wanted even of a request without a key.
        """
        if ENVIRON_KEY in environ:
            raise Misuse(f"{request.route} is keyed twice: one edge and one keyed handler serve one request")
        with ExitStack() as turn:
            try:
                if always or request.may_be_keyed(policy):
                    # The body first: a connection that dies while it sends must keep no retry waiting.
                    request.body = read()
                exchange = Exchange(self, policy, request)
                if (key := exchange.current.key) is not None:  # without a key nobody waits
                    place = gate_key(request.method, request.path, request.headers, key)
                    turn.enter_context(self.gate.turn(place, policy.wait_s))
            except (RequestError, InFlight) as error:
                return answered(refused(self, policy, request, error))
            conducted = environ[ENVIRON_KEY] = Conducted(exchange, self.gate)
            token = current.set(exchange.current)
            try:
                return work(conducted)
            finally:
                current.reset(token)
                if exchange.state is not State.OVER:
                    conducted.abandon()  # it ended without an answer
                exchange.emit()


def request_of(environ: Environ, route: str | None = None) -> Request:
    """What is known of a request before its body."""
    target = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    if target is None:
        path = quote((environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1"))
    else:
        path = (target if target.startswith("/") else urlsplit(target).path).partition("?")[0]
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return Request(
        environ["REQUEST_METHOD"],
        path.encode("latin-1"),
        path if route is None else route,
        environ.get("QUERY_STRING", "").encode("latin-1"),
        tuple((n.replace("_", "-").lower().encode(), str(v).encode("latin-1")) for n, v in named.items()),
    )


def read_body(environ: Environ, reading: Reading) -> bytes:
    """The whole body, which the application can then read again."""
    # Without a length the server must say that its input ends, or reading would wait for ever.
    stream = environ["wsgi.input"] if reading.length or environ.get("wsgi.input_terminated") else io.BytesIO()
    try:
        while chunk := stream.read(min(CHUNK, reading.missing) if reading.length else CHUNK):
            reading.feed(chunk)
    except OSError as error:
        raise RequestIncomplete from error
    body = reading.end()
    environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    environ.pop("HTTP_TRANSFER_ENCODING", None)
    return body


def check_view(view: Any) -> None:
    """Raises `Misuse` for a function that has not done its work when it returns."""
    for each in (view, inspect.unwrap(view)):
        name = getattr(view, "__qualname__", repr(view))
        if inspect.iscoroutinefunction(each):
            raise Misuse(f"{name} is an async function: a keyed handler under WSGI is a plain def")
        if inspect.isgeneratorfunction(each):
            raise Misuse(
                f"{name} is a generator and would still be working after its answer was committed: do the "
                "work first, then return a generator of the answer"
            )


def hold(policy: Policy, start: Message, chunks: Iterator[bytes]) -> Conclude:
    """Take from `chunks` what must be known of an answer before the commit; what follows stays in them."""
    holding = Holding(policy)
    step = holding.feed(start)
    while isinstance(step, Hold):
        chunk = next(chunks, None)
        step = holding.feed({"type": BODY, "body": chunk or b"", "more_body": chunk is not None})
    if not isinstance(step, Conclude):
        raise AssertionError("an answer is held until it is concluded")
    return step


def start_of(status: int, headers: Iterable[tuple[str, str]], line: str | None = None) -> Message:
    """The beginning of an answer. `line` is its status as the application wrote it."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": START, "status": status, "headers": encoded, "line": line}


def send(messages: Iterable[Message], start_response: StartResponse) -> Iterator[bytes]:
    """The beginning goes to the server at once; given back is what it is to send behind that."""
    start, *parts = messages
    status = start["status"]
    phrase = http.client.responses.get(status, "Unknown")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
    start_response(start.get("line") or f"{status} {phrase}", headers)
    return (part["body"] for part in parts if part["body"])


class Begun:
    """The `start_response` that a keyed application gets. What it writes is kept until it returns."""

    def __init__(self, start_response: StartResponse) -> None:
        self._start_response = start_response
        self._sent = False
        self.status = ""
        self.headers: list[tuple[str, str]] = []
        self.written: list[bytes] = []

    def __call__(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], Any]:
        if self._sent:
            return self._start_response(status, headers, exc_info)  # type: ignore[no-any-return]  # raises it
        if self.status and exc_info is None:
            raise AssertionError("start_response was called twice, without exc_info")
        self.status, self.headers = status, list(headers)
        self.written.clear()
        return self.written.append

    def start(self, length: int | None) -> Message:
        """The beginning of the answer. `length` of the body, where it is known."""
        if not self.status:
            raise Misuse("the application has answered without calling start_response")
        status = int(self.status[:3])
        has_length = any(name.lower() == "content-length" for name, _ in self.headers)
        if length is not None and not has_length and status not in BODILESS:
            self.headers.append(("Content-Length", str(length)))
        return start_of(status, self.headers, self.status)

    def send(self, messages: Iterable[Message]) -> Iterator[bytes]:
        self._sent = True
        return send(messages, self._start_response)


class Body:
    """What the server iterates over, and closes."""

    def __init__(self, chunks: Iterable[bytes], closing: Any) -> None:
        self._chunks = chunks
        self._closing = closing

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        if hasattr(self._closing, "close"):
            self._closing.close()


def through(
    app: App, environ: Environ, start_response: StartResponse, conducted: Conducted
) -> Iterable[bytes]:
    """A claimed request through the application; nothing leaves before the commit."""
    begun = Begun(start_response)
    result: Iterable[bytes] = ()
    try:
        result = app(environ, begun)
        chunks = chain(begun.written, result)
        first = next(filter(None, chunks), None)  # a generator calls start_response as late as here
        rest = [] if first is None else list(chunks) if isinstance(result, list | tuple) else chunks
        known = sum(map(len, rest)) + len(first or b"") if isinstance(rest, list) else None
        chunks = chain(() if first is None else (first,), rest)
        step = hold(conducted.exchange.policy, begun.start(known), chunks)
        instead = conducted.conclude(step.answer)
    except BaseException as error:
        Body((), result).close()
        if isinstance(error, NotSaved) and conducted.exchange.open:
            conducted.exchange.not_saved = True
            answer: Answer | None = error.answer
            conducted.conclude(error.answer)
        else:
            answer = conducted.failed(error)
        if answer is None:
            raise
        return list(send(messages_of(answer), start_response))
    if instead is not None:
        return Body(begun.send(messages_of(instead)), result)
    return Body(chain(begun.send(step.messages), chunks), result)


def conducted_in(environ: Environ) -> Conducted:
    """The exchange of the keyed handler that is under way. Raises `Misuse` where there is none."""
    found: Conducted | None = environ.get(ENVIRON_KEY)
    if found is None:
        raise Misuse("the claim's connection is used in a request that is not keyed")
    return found


class Idempotency(WsgiSettings):
    """Idempotency for plain WSGI applications."""

    def keyed(
        self,
        app: App,
        *,
        account: Callable[[Environ], str | None],
        parse: Callable[[bytes], Any] | None = None,
        **changes: Any,
    ) -> App:
        """The application, keyed. `account` says whose request it is; `parse` may refuse a body before the
        claim: it raises `NotSaved` with an `Answer`. Other settings are those of `Policy`.

        An answer is saved with its body if it is a list, or has a Content-Length; else it is a stream.
        """
        policy = changed(self.policy, **changes)

        def keyed(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] not in policy.methods:
                return app(environ, start_response)
            request = request_of(environ)

            def read() -> bytes:
                return read_body(environ, Reading(request.headers, policy.request_max_body))

            def answered(answer: Answer) -> Iterable[bytes]:
                return list(send(messages_of(answer), start_response))

            def work(conducted: Conducted) -> Iterable[bytes]:
                try:
                    whose = account(environ)
                    if parse is not None:
                        parse(conducted.exchange.request.body)
                except NotSaved as unsaved:
                    return answered(unsaved.answer)
                answer = conducted.claim(whose)
                return (
                    through(app, environ, start_response, conducted) if answer is None else answered(answer)
                )

            return self.serve(policy, request, environ, read, work, answered, always=parse is not None)

        return keyed

    @staticmethod
    def connection(environ: Environ) -> Any:
        """The connection of the claim."""
        return conducted_in(environ).handle
