"""The guard: a claim in the caller's own transaction, or in one that it begins and commits itself.

    with engine.begin() as connection:
        with guard.claim(connection, account="acct_42", key=key, request=body) as claim:
            if claim.replayed:
                return claim.answer
            charge = insert_charge(connection, cents)
            claim.finish(201, {"charge_id": charge})

or, where the transaction is not yours but is to be begun and committed for you:

    with guard.transaction(pool, account="acct_42", key=key, request=body) as claim:
        if not claim.replayed:
            charge = insert_charge(claim.connection, cents)
            claim.finish(201, {"charge_id": charge})
    return claim.answer

`Guard` blocks, `AsyncGuard` awaits; both drive the plans of `flows.transaction`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from taptwice import drivers
from taptwice.core import fingerprint as fingerprints
from taptwice.core.fingerprint import Fingerprint
from taptwice.core.header import check_key
from taptwice.core.model import Answer, Headers, Keyed, is_account, key_hash, pack_headers
from taptwice.core.plan import Flush, Plan, arun, ask, run
from taptwice.core.policy import seconds
from taptwice.drivers import Source
from taptwice.errors import InFlight as InFlightError
from taptwice.errors import KeyReused, Misuse, StoreUnavailable, TaptwiceError, Torn, Unfinished
from taptwice.events import Event, Listener, Outcome, emit, is_heard, logger
from taptwice.flows import transaction
from taptwice.flows.current import Current, current
from taptwice.flows.transaction import Asked, Claimed, Replayed
from taptwice.stores.sql import SqlStore

JsonValue: TypeAlias = (
    "Mapping[str, JsonValue] | list[JsonValue] | tuple[JsonValue, ...] | str | int | float | bool | None"
)
Request: TypeAlias = "Fingerprint | bytes | Mapping[str, Any] | list[Any] | tuple[Any, ...] | str | int"


_JSON = json.JSONEncoder(separators=(",", ":"))


def fingerprint_of(request: Request) -> Fingerprint:
    """The fingerprint of a request: one made already, of bytes, or of a JSON value by its meaning."""
    if isinstance(request, Fingerprint):
        return request
    if isinstance(request, bytes):
        return fingerprints.of_bytes(request)
    return fingerprints.of_value(request)


def checked(account: Any, key: str) -> Keyed:
    """Account and key as one value. Raises `KeyInvalid`; `Misuse` for an account that cannot be one."""
    if not is_account(account):
        raise Misuse(
            "account must be text (not empty, no NUL, no half surrogates), taken from the login; "
            f"got {type(account).__name__}"
        )
    return Keyed(account, check_key(key))


def answer_from(status: Any, body: Any, headers: Mapping[str, str] | Headers) -> Answer:
    """An answer from what a program has: bytes and text as they are, None as empty, the rest as JSON."""
    if not isinstance(status, int) or not 100 <= status <= 999:
        raise Misuse(f"status must be a number from 100 to 999, not {status!r}")
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    try:
        _ = pack_headers(pairs)  # while the work can still be undone
    except UnicodeEncodeError:
        raise Misuse("a header of the answer holds a character beyond Latin-1, as none can") from None
    kind: str | None = None
    if body is None:
        content = b""
    elif isinstance(body, bytes):
        content = body
    elif isinstance(body, str):
        content, kind = body.encode(), "text/plain; charset=utf-8"
    else:
        content, kind = _JSON.encode(body).encode(), "application/json"
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


Result = TypeVar("Result")


class Claim:
    """The right to do the work of one key, or the answer of whoever did it."""

    def __init__(self, executor: Any, asked: Asked) -> None:
        self._executor = executor
        self._asked = asked
        self._claimed: Claimed | None = None
        self._answer: Answer | None = None
        self.replayed = False
        """True: the work was done before, and `answer` is what was answered."""

    @property
    def answer(self) -> Answer:
        """The saved answer of a replay, or the one given to `finish`."""
        if self._answer is None:
            raise Misuse(
                "this claim has no answer yet: it is new; do the work, then call claim.finish(status, body)"
            )
        return self._answer

    @property
    def connection(self) -> Any:
        """What to work on: the connection or session of the claim's transaction, while the block lasts."""
        return self._executor.handle

    def finish(self, status: int, body: Any = None, headers: Mapping[str, str] | Headers = ()) -> Answer:
        """The answer that every later attempt gets. It is saved when the block ends.

        `body`: bytes or text as they are, None as empty, anything else as JSON.
        """
        if self._claimed is None:
            raise Misuse(
                "nothing to finish: the work was done before; return claim.answer when claim.replayed"
            )
        if self._answer is not None:
            raise Misuse("claim.finish() was called twice: one claim has one answer")
        self._answer = answer_from(status, body, headers)
        return self._answer


_open: dict[int, list[_Block]] = {}
"""The blocks that are open on a connection, by its identity, the innermost last."""


class _Block(Claim):
    """What entering and leaving a claim's block are, as plans; the two halves below drive them.

    `joined`: in the caller's transaction. Otherwise in one of its own.
    """

    def __init__(self, guard: _Settings, executor: Any, asked: Asked, joined: bool) -> None:
        super().__init__(executor, asked)
        self._guard = guard
        self._store = SqlStore(executor.dialect, guard.in_clear)
        self._joined = joined
        self._place = id(executor)
        self._events: list[Event] = []
        self._token: Any = None

    # --- entering ------------------------------------------------------------------------------

    def _enter(self) -> Plan[None]:
        try:
            if self._joined:
                self._check_alone()
                outcome = yield from transaction.join(self._store, self._asked)
            else:
                outcome = yield from transaction.open_claim(self._store, self._asked)
        except TaptwiceError as error:
            if (name := outcome_of(error)) is not None:
                self._note(name, detail=error.detail)
            self._emit()
            raise
        if isinstance(outcome, Replayed):
            self._replay(outcome.record.answer)
        else:
            self._claimed = outcome
            self._note(Outcome.NEW)
            if self._joined:
                self._place = id(self.connection)
                _open.setdefault(self._place, []).append(self)
        # Inside a keyed handler its own stays: sessions find the transaction there that they join.
        if (around := current.get()) is None or around.executor is None:
            self._token = current.set(Current(self._asked.keyed.key))

    def _check_alone(self) -> None:
        around = _open.get(id(self.connection), ())
        if any(block._asked.keyed == self._asked.keyed for block in around):
            raise Misuse("this key is claimed already by a block around this one: claim it once")

    # --- leaving -------------------------------------------------------------------------------

    def _leave(self, error: BaseException | None) -> Plan[None]:
        """End the claim. `error` is what the block raised; it goes on whatever happens here."""
        outcome, detail = Outcome.RELEASED, None
        try:
            if self._claimed is None:
                return
            if error is not None or self._answer is None:
                if not (yield from self._give_up()):
                    outcome, detail = Outcome.TORN, "the block ended the claim's transaction, and failed"
                if error is None:
                    raise Unfinished
                return
            yield from self._save(self._claimed, self._answer)
            outcome = Outcome.FINISHED
        except TaptwiceError as failure:
            torn = isinstance(failure, Torn)
            outcome = Outcome.TORN if torn else outcome_of(failure) or outcome
            detail = failure.detail
            if error is None or (isinstance(failure, Misuse) and not torn):
                raise
            logger.warning("the work of a claim that failed could not be undone: %s", failure)
        finally:
            if self._claimed is not None and not self.replayed:
                self._note(
                    outcome, status=None if self._answer is None else self._answer.status, detail=detail
                )
            self._emit()

    def _give_up(self) -> Plan[bool]:
        """False where there was no transaction of ours any more to give up."""
        if not self._joined:
            return (yield from transaction.abandon())
        self._check_innermost()
        yield from transaction.withdraw()
        return True

    def _save(self, claimed: Claimed, answer: Answer) -> Plan[None]:
        if self._joined:
            self._check_innermost()
            yield from transaction.settle(self._store, self._asked, claimed, answer)
            return
        try:
            yield from ask(Flush())  # its errors are the user's
        except BaseException:
            yield from transaction.abandon()
            raise
        concluded = yield from transaction.conclude(self._store, self._asked, claimed, answer, undo=False)
        if concluded.torn:
            self._note(Outcome.TORN, status=answer.status, detail=Torn().detail)
        if concluded.replayed:  # another attempt came between, and its answer is the one that counts
            self._replay(concluded.answer)

    def _check_innermost(self) -> None:
        # Savepoints have one name: to undo the outer one first would undo no more than the inner one's work.
        around = _open[self._place]
        innermost = around[-1] is self
        around.remove(self)
        if not around:
            del _open[self._place]
        if not innermost:
            raise Misuse(
                "claims on one connection must end in the reverse of their order: nest their blocks, and do "
                "not share a connection between tasks; roll this transaction back"
            )

    # --- events --------------------------------------------------------------------------------

    def _replay(self, answer: Answer) -> None:
        self.replayed = True
        self._answer = answer
        self._note(Outcome.REPLAYED, status=answer.status)

    def _note(self, outcome: Outcome, **more: Any) -> None:
        if not is_heard(outcome, self._guard.listeners):
            return
        keyed = self._asked.keyed
        shown = self._guard.shown
        event = Event(outcome, shown(keyed.account), shown(keyed.key), pending=self._joined, **more)
        self._events.append(event)

    def _emit(self) -> None:
        emit(self._events, self._guard.listeners)
        self._events.clear()

    def _forget(self) -> None:
        token, self._token = self._token, None
        if token is None:
            return
        try:
            current.reset(token)
        except ValueError:
            pass  # left in another task than it was entered in, which has a variable of its own


class BlockingBlock(_Block):
    """The block of `Guard.claim` and `Guard.transaction`."""

    def __enter__(self) -> Claim:
        run(self._enter(), self._executor.execute)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            run(self._leave(error), self._executor.execute)
        finally:
            self._forget()


class AwaitingBlock(_Block):
    """The block of `AsyncGuard.claim` and `AsyncGuard.transaction`."""

    async def __aenter__(self) -> Claim:
        await arun(self._enter(), self._executor.execute)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = arun(self._leave(error), self._executor.execute)
        # In its own transaction a claim is ended whoever cancels; in the caller's it ends with that.
        try:
            await (leaving if self._joined else asyncio.shield(asyncio.ensure_future(leaving)))
        finally:
            self._forget()


class _Settings:
    """What both guards are told.

    `listeners` hear every `Event`; `in_clear` False keeps account and key out of the table (their hash
    is enough to work); `show` True puts them in the clear into events and logs.
    """

    def __init__(
        self, listeners: Iterable[Listener] = (), *, in_clear: bool = True, show: bool = False
    ) -> None:
        self.listeners = tuple(listeners)
        self.in_clear = in_clear
        self.show = show

    def shown(self, value: str) -> str:
        """An account or a key as it may stand in events: hashed, unless told otherwise."""
        return value if self.show else key_hash(value)

    def _asked(
        self, account: str, key: str, request: Request, window: float | str, wait: float | str
    ) -> Asked:
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
        if _awaits(executor):
            raise Misuse(f"{type(connection).__qualname__} awaits: use AsyncGuard and `async with`")
        return BlockingBlock(self, executor, self._asked(account, key, request, window, wait), joined=True)

    def transaction(
        self,
        origin: Any,
        *,
        account: str,
        key: str,
        request: Request,
        window: float | str = "24h",
        wait: float | str = "5s",
    ) -> BlockingBlock:
        """Claim a key in a transaction of its own, which commits at the end of the block.

        `origin`: a pool, engine or session maker, or a function that opens a connection; it is taken when
        the block is entered, and not held while waiting for another attempt. Work on ``claim.connection``.
        The rest is as for `claim`. After the block ``claim.answer`` is what was answered.
        """
        source = _source(origin)
        if not source.blocking:
            raise Misuse(f"{type(origin).__qualname__} awaits: use AsyncGuard and `async with`")
        asked = self._asked(account, key, request, window, wait)
        return BlockingBlock(self, source.open(), asked, joined=False)


class AsyncGuard(_Settings):
    """Claims on awaiting connections: aiosqlite, psycopg, asyncpg, SQLAlchemy's AsyncConnection and so on."""

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
        return AwaitingBlock(self, executor, self._asked(account, key, request, window, wait), joined=True)

    def transaction(
        self,
        origin: Any,
        *,
        account: str,
        key: str,
        request: Request,
        window: float | str = "24h",
        wait: float | str = "5s",
    ) -> AwaitingBlock:
        """As `Guard.transaction`, with ``async with``."""
        source = _source(origin)
        if source.blocking:
            raise Misuse(f"{type(origin).__qualname__} blocks: use Guard and `with`")
        asked = self._asked(account, key, request, window, wait)
        return AwaitingBlock(self, source.open(), asked, joined=False)


def _awaits(executor: Any) -> bool:
    return inspect.iscoroutinefunction(executor.execute)


@functools.lru_cache(maxsize=8)
def _source(origin: Any) -> Source:
    """Kept for those in use: a function is called to see what it opens, and once is enough."""
    return drivers.source(origin)
