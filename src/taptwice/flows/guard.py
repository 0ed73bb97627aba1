"""The guard: a claim in the caller's own transaction, or in one that it begins and commits itself.

    with engine.begin() as connection:
        with guard.claim(connection, account="acct_42", key=key, request=body) as claim:
            if claim.replayed:
                return claim.answer
            charge = insert_charge(connection, cents)
            claim.finish(201, {"charge_id": charge})

`Guard` blocks, `AsyncGuard` awaits; both drive the plans of `flows.transaction`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, TypeAlias

from taptwice import drivers
from taptwice.core import fingerprint as fingerprints
from taptwice.core.fingerprint import Fingerprint
from taptwice.core.header import check_key
from taptwice.core.model import Answer, Headers, Keyed, key_hash
from taptwice.core.plan import arun, run
from taptwice.core.policy import seconds
from taptwice.errors import KeyReused, Misuse, StoreUnavailable, TaptwiceError, Torn, Unfinished
from taptwice.errors import InFlight as InFlightError
from taptwice.events import Event, Listener, Outcome, emit
from taptwice.flows import transaction
from taptwice.flows.current import Current, current
from taptwice.flows.transaction import Asked, Claimed, Replayed
from taptwice.stores.sql import SqlStore

JsonValue: TypeAlias = (
    "Mapping[str, JsonValue] | list[JsonValue] | tuple[JsonValue, ...] | str | int | float | bool | None"
)
Request: TypeAlias = "Fingerprint | bytes | Mapping[str, Any] | list[Any] | tuple[Any, ...] | str | int"


def fingerprint_of(request: Request) -> Fingerprint:
    """The fingerprint of a request: one made already, of bytes, or of a JSON value by its meaning."""
    if isinstance(request, Fingerprint):
        return request
    if isinstance(request, bytes):
        return fingerprints.of_bytes(request)
    return fingerprints.of_value(request)


def checked(account: str, key: str) -> Keyed:
    """Account and key as one value. Raises `KeyInvalid`; `Misuse` for an account that cannot be one."""
    if not isinstance(account, str) or not account or "\0" in account:
        raise Misuse(f"account must be text, not empty and without NUL, taken from the login; got {type(account)}")
    return Keyed(account, check_key(key))


def answer_from(status: int, body: Any, headers: Mapping[str, str] | Headers) -> Answer:
    """An answer from what a program has at hand: bytes and text as they are, None as empty, the rest as JSON."""
    if not isinstance(status, int) or not 100 <= status <= 999:
        raise Misuse(f"status must be a number from 100 to 999, not {status!r}")
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    kind: str | None = None
    if body is None:
        content = b""
    elif isinstance(body, bytes):
        content = body
    elif isinstance(body, str):
        content, kind = body.encode(), "text/plain; charset=utf-8"
    else:
        content, kind = json.dumps(body, separators=(",", ":")).encode(), "application/json"
    if kind and not any(name.lower() == "content-type" for name, _ in pairs):
        pairs = (("content-type", kind), *pairs)
    return Answer(status, pairs, content)


OUTCOMES: tuple[tuple[type[TaptwiceError], Outcome], ...] = (
    (KeyReused, Outcome.MISMATCH),
    (InFlightError, Outcome.IN_FLIGHT),
    (StoreUnavailable, Outcome.STORE_UNAVAILABLE),
)


def outcome_of(error: BaseException) -> Outcome | None:
    """The outcome that a refused claim is counted as."""
    return next((outcome for kind, outcome in OUTCOMES if isinstance(error, kind)), None)


class Claim:
    """The right to do the work of one key, or the answer of whoever did it."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._claimed: Claimed | None = None
        self._answer: Answer | None = None
        self.replayed = False
        """True: the work was done before, and `answer` is what was answered."""

    @property
    def answer(self) -> Answer:
        """The saved answer of a replay, or the one given to `finish`."""
        if self._answer is None:
            raise Misuse("this claim has no answer yet: it is new; do the work, then call claim.finish(status, body)")
        return self._answer

    def finish(self, status: int, body: Any = None, headers: Mapping[str, str] | Headers = ()) -> Answer:
        """The answer that every later attempt gets. It is saved when the block ends.

        `body`: bytes or text as they are, None as empty, anything else as JSON.
        """
        if self.replayed:
            raise Misuse("this claim is a replay: its work was done and answered before; return claim.answer")
        if self._answer is not None:
            raise Misuse("finish() was called twice in one claim")
        self._answer = answer_from(status, body, headers)
        return self._answer


class _Block(Claim):
    """What entering and leaving a claim's block means; the two guards' blocks drive it."""

    def __init__(self, guard: _Settings, executor: Any, asked: Asked) -> None:
        super().__init__(asked)
        self._guard = guard
        self._executor = executor
        self._store = SqlStore(executor.dialect, guard.in_clear)
        self._events: list[Event] = []
        self._token: Any = None

    def _note(self, outcome: Outcome, **more: Any) -> None:
        keyed = self._asked.keyed
        self._events.append(
            Event(outcome, self._guard.shown(keyed.account), self._guard.shown(keyed.key), pending=True, **more)
        )

    def _entered(self, outcome: Claimed | Replayed) -> None:
        if isinstance(outcome, Replayed):
            self.replayed = True
            self._answer = outcome.record.answer
            self._note(Outcome.REPLAYED, status=self._answer.status)
        else:
            self._claimed = outcome
            self._note(Outcome.NEW)
        self._token = current.set(Current(key_hash(self._asked.keyed.key)))

    def _refused(self, error: TaptwiceError) -> None:
        if (outcome := outcome_of(error)) is not None:
            self._note(outcome, detail=error.detail)
        self._emit()

    def _left(self, finished: bool) -> None:
        if not self.replayed:
            self._note(Outcome.FINISHED if finished else Outcome.RELEASED)
        self._emit()

    def _emit(self) -> None:
        if self._token is not None:
            current.reset(self._token)
            self._token = None
        emit(self._events, self._guard.listeners)
        self._events.clear()


class BlockingBlock(_Block):
    """The block of `Guard.claim`."""

    def __enter__(self) -> Claim:
        try:
            self._entered(run(transaction.join(self._store, self._asked), self._executor.execute))
        except TaptwiceError as error:
            self._refused(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = False
        try:
            if self._claimed is None:
                return
            if error is not None or self._answer is None:
                run(transaction.withdraw(), self._executor.execute)
                if error is None:
                    raise Unfinished
                return
            run(transaction.settle(self._store, self._asked, self._claimed, self._answer), self._executor.execute)
            finished = True
        except Torn:
            if error is None:
                raise
        finally:
            self._left(finished)


class AwaitingBlock(_Block):
    """The block of `AsyncGuard.claim`."""

    async def __aenter__(self) -> Claim:
        try:
            self._entered(await arun(transaction.join(self._store, self._asked), self._executor.execute))
        except TaptwiceError as error:
            self._refused(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = False
        try:
            if self._claimed is None:
                return
            if error is not None or self._answer is None:
                await arun(transaction.withdraw(), self._executor.execute)
                if error is None:
                    raise Unfinished
                return
            await arun(
                transaction.settle(self._store, self._asked, self._claimed, self._answer), self._executor.execute
            )
            finished = True
        except Torn:
            if error is None:
                raise
        finally:
            self._left(finished)


class _Settings:
    """What both guards are told.

    `listeners` hear every `Event`; `in_clear` False keeps account and key out of the table (their hash
    is enough to work); `show` True puts them in the clear into events and logs.
    """

    def __init__(self, listeners: Iterable[Listener] = (), *, in_clear: bool = True, show: bool = False) -> None:
        self.listeners = tuple(listeners)
        self.in_clear = in_clear
        self.show = show

    def shown(self, value: str) -> str:
        """An account or a key as it may stand in events: hashed, unless told otherwise."""
        return value if self.show else key_hash(value)

    def _asked(self, account: str, key: str, request: Request, window: float | str, wait: float | str) -> Asked:
        return Asked(checked(account, key), fingerprint_of(request), seconds(window), seconds(wait))


class Guard(_Settings):
    """Claims on blocking connections: sqlite3, psycopg, SQLAlchemy's Connection and Session."""

    def claim(
        self,
        connection: Any,
        *,
        account: str,
        key: str,
        request: Request,
        window: float | str = "24h",
        wait: float | str = "5s",
    ) -> BlockingBlock:
        """Claim a key inside the transaction that is open on `connection`; the commit stays the caller's.

        `account`: whose key it is, from the login. `request`: what was asked for; another request under
        the same key raises `KeyReused`. `window`: how long the key is remembered, at least. `wait`: how
        long to wait for another attempt that is running; 0 raises `InFlight` at once.

        Leaving the block by an exception, or without ``finish()`` (which raises `Unfinished`), undoes
        the work since the claim and saves nothing.
        """
        executor = drivers.join(connection)
        if not hasattr(executor, "execute") or _awaits(executor):
            raise Misuse(f"{type(connection).__qualname__} awaits: use AsyncGuard and `async with`")
        return BlockingBlock(self, executor, self._asked(account, key, request, window, wait))


class AsyncGuard(_Settings):
    """Claims on awaiting connections: aiosqlite, psycopg, asyncpg, SQLAlchemy's AsyncConnection and AsyncSession."""

    def claim(
        self,
        connection: Any,
        *,
        account: str,
        key: str,
        request: Request,
        window: float | str = "24h",
        wait: float | str = "5s",
    ) -> AwaitingBlock:
        """As `Guard.claim`, with ``async with``."""
        executor = drivers.join(connection)
        if not _awaits(executor):
            raise Misuse(f"{type(connection).__qualname__} blocks: use Guard and `with`")
        return AwaitingBlock(self, executor, self._asked(account, key, request, window, wait))


def _awaits(executor: Any) -> bool:
    import inspect

    return inspect.iscoroutinefunction(executor.execute)
