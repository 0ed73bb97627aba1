"""One keyed request, from its key to its answer, whatever framework carries it.

Nothing here blocks or awaits: `claim`, `conclude` and `abandon` are plans, and the adapters drive them.

    claim ........ where the caller is known: after login and validation
    [the handler]  `raised`, `not_saved` are told by the adapter
    conclude ..... where the bytes are final: outside the route's exception handlers
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from taptwice.core import fingerprint
from taptwice.core.header import (
    OMITTED,
    check_key,
    is_random_uuid,
    key_age,
    parse_key,
    retry_after,
)
from taptwice.core.model import Answer, Keyed, is_account
from taptwice.core.plan import Begin, Commit, Plan, Release, Savepoint, ask
from taptwice.core.policy import Policy
from taptwice.core.problems import problem
from taptwice.drivers import system
from taptwice.errors import (
    AccountMissing,
    Contention,
    InFlight,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    Misuse,
    StoreUnavailable,
    TaptwiceError,
    Torn,
)
from taptwice.events import Event, Outcome, emit, is_heard, logger
from taptwice.flows import transaction
from taptwice.flows.current import Current
from taptwice.flows.transaction import TURN, Asked, Claimed, Concluded, Replayed
from taptwice.http.request import Request
from taptwice.http.settings import Settings
from taptwice.stores.sql import SqlStore


class State(Enum):
    NEW = "new"
    CLAIMED = "claimed"
    UNPROTECTED = "unprotected"
    OVER = "over"


class Exchange:
    """The state of one request under a keyed route."""

    def __init__(self, settings: Settings, policy: Policy, request: Request) -> None:
        self.settings = settings
        self.policy = policy
        self.request = request
        self.state = State.NEW
        self.raised = False
        """An exception crossed the handler: its work is undone, whatever is answered."""
        self.not_saved = False
        """The handler asked for an answer that is not saved."""
        self.current = Current(joinable=True)
        self._executor: Any = None
        self._store: SqlStore | None = None
        self._asked: Asked | None = None
        self._claimed: Claimed | None = None
        self._account: str | None = None
        self._events: list[Event] = []
        self._shown: tuple[str | None, str | None, str] | None = None
        """Account, key and route as events show them."""
        self._key: str | None = None
        self._key_error: KeyInvalid | None = None
        try:
            self._key = self._read_key()
        except KeyInvalid as error:
            self._key_error = error
        self.current.key = self._key

    @property
    def executor(self) -> Any:
        """What the claim, the work and the answer are carried out by."""
        if self._executor is None:
            self._executor = self.settings.source.open()
        return self._executor

    @property
    def begun(self) -> bool:
        """Whether anything of it may have to be undone."""
        return self._executor is not None

    @property
    def open(self) -> bool:
        """Whether a transaction of ours is under way."""
        return self.state in (State.CLAIMED, State.UNPROTECTED)

    @property
    def handle(self) -> Any:
        """What the handler works on. Raises `Misuse` outside the claim."""
        if not self.open:
            raise Misuse(
                "the claim's connection is used outside the keyed handler: before the claim (a login should "
                "read through a connection of its own) or after the answer"
            )
        return self.executor.handle

    # --- claim ---------------------------------------------------------------------------------

    def claim(self, account: str | None) -> Plan[Answer | None]:
        """Claim the key for the account. None: do the work. An answer: send it, the work is not to be done.

        Raises `Misuse` alone; every other refusal is an answer.
        """
        if self.state is not State.NEW:
            raise Misuse("this request was claimed already: one keyed handler serves one request")
        try:
            asked = self._ask(account)
            if self.current.earlier and self.executor.holds_back:
                self.executor.settle_first(self.current.earlier)
            if asked is None:
                yield from self._open_unprotected()
                return None
            self._asked, self._store = asked, self.settings.store()
            outcome = yield from transaction.open_claim(self._store, asked)
        except Misuse:
            raise
        except TaptwiceError as error:
            return self.refusal(error)
        if isinstance(outcome, Replayed):
            _ = self._end()
            self._note(Outcome.REPLAYED, status=outcome.record.answer.status)
            return self._replay(outcome.record.answer)
        self._claimed = outcome
        self._note(Outcome.NEW)
        self._opened(State.CLAIMED)
        return None

    def _ask(self, account: Any) -> Asked | None:
        if account not in (None, "") and not is_account(account):
            kind = type(account).__name__
            raise Misuse(
                f"account must give text (no NUL, no half surrogate), or None for nobody; got {kind}"
            )
        self._account = account or None
        policy, key = self.policy, self._key
        if self._key_error is not None:
            raise self._key_error
        if key is None:
            if policy.required:
                raise KeyMissing(_missing(policy))
            return None
        if not account:
            if policy.anonymous == "reject":
                raise AccountMissing
            if not is_random_uuid(key):
                raise KeyInvalid("Without a login the key must be a random UUID (version 4 or 7).")
        if policy.uuid7_guard:
            age = key_age(key, self._wall_clock())
            if age is not None and age > policy.window_s:
                raise KeyExpired
        space = account or ""
        if policy.scope == "route":
            # A route holds no line break, so that the last one tells the two apart.
            space = f"{space}\n{self.request.route}"
        return Asked(
            Keyed(space, key),
            fingerprint.of_request(
                self.request.method,
                self.request.path,
                self.request.query,
                self.request.headers,
                self.request.body,
                policy.fingerprint,
            ),
            policy.window_s,
            policy.wait_s,
            policy.savepoint,
        )

    def _wall_clock(self) -> float:
        given = None if self.settings.clock is None else self.settings.clock()
        return system.wall_clock() if given is None else given

    def _read_key(self) -> str | None:
        pointer = self.policy.key_pointer
        if pointer is None:
            return parse_key(self.request.headers, self.policy.key)
        body = self.request.body
        if not body:
            return None
        try:
            if fingerprint.has_many_values(body):
                raise ValueError
            found = json.loads(body)
        except (ValueError, RecursionError):
            # As with a header: whoever sent what cannot be read may have wanted to be protected.
            raise KeyInvalid("The body, in which the key should stand, cannot be read as JSON.") from None
        try:
            for step in pointer.split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                found = found[int(step)] if isinstance(found, list) else found[step]
        except (ValueError, KeyError, IndexError, TypeError):
            return None
        return check_key(found, self.policy.key)

    def _open_unprotected(self) -> Plan[None]:
        """No key, and none required: the work still gets its transaction, and commits with its answer."""
        try:
            yield from ask(Begin(TURN))
            if self.policy.savepoint:
                yield from ask(Savepoint())
        except BaseException:
            yield from transaction.abandon()
            raise
        self._opened(State.UNPROTECTED)

    def _opened(self, state: State) -> None:
        self.state = state
        # Published only once it is open: whoever sees it may use it.
        self.current.executor = self.executor
        for session in self.current.made:
            session.join_claim()

    # --- conclude ------------------------------------------------------------------------------

    def conclude(self, answer: Answer) -> Plan[Answer | None]:
        """Save what is to be saved, end the transaction, give the connection back.

        `answer` is what the handler's side wants to send; a body of None is one that cannot be kept.
        None: send it. An answer: send that one instead.

        A refusal of ours is such an answer. Raises what the database said to the user's own work at the
        commit; nothing is saved then.
        """
        claimed, asked, store = self._claimed, self._asked, self._store
        keeps = self.policy.keeps(answer.status) and not self.not_saved
        state = self._end()
        try:
            if not keeps or (state is State.UNPROTECTED and self.raised):
                yield from self._release(state, answer.status)
                return None
            if state is State.UNPROTECTED:
                concluded = yield from self._commit_unprotected(answer)
            elif claimed is None or asked is None or store is None:
                raise AssertionError("a claim has all three")
            else:
                headers = self.policy.kept_headers(answer.headers)
                saved = Answer(answer.status, headers, self._kept_body(answer.body))
                concluded = yield from transaction.conclude(store, asked, claimed, saved, self.raised)
        except Misuse:
            self._note(Outcome.RELEASED)
            raise
        except TaptwiceError as error:
            if isinstance(error, Contention):
                self._note(Outcome.RELEASED, detail=error.detail)
            return self.refusal(error)
        except BaseException:
            self._note(Outcome.RELEASED)
            raise
        if concluded.torn:
            self._note(Outcome.TORN, status=answer.status, detail="the handler ended its transaction")
            if self.settings.strict:
                raise Torn
        if state is State.UNPROTECTED:
            return None
        if concluded.replayed:
            self._note(Outcome.REPLAYED, status=concluded.answer.status)
            return self._replay(concluded.answer)
        self._note(Outcome.FINISHED, status=answer.status)
        return None

    def _commit_unprotected(self, answer: Answer) -> Plan[Concluded]:
        try:
            if self.policy.savepoint:
                yield from ask(Release())
            yield from ask(Commit())
        except Torn:
            # The work is done all the same: told of an error, its sender would have it done again.
            yield from transaction.end_foreign()
            return Concluded(answer, torn=True)
        finally:
            yield from transaction.abandon()
        return Concluded(answer)

    def _kept_body(self, body: bytes | None) -> bytes | None:
        return None if body is None or len(body) > self.policy.save_max_body else body

    def abandon(self) -> Plan[None]:
        """Undo everything and give the connection back; the key is free. May be called in any state."""
        state = self._end()
        if self.begun:
            yield from self._release(state)

    def _end(self) -> State:
        """It is over from here on. The state that it was in."""
        state, self.state = self.state, State.OVER
        self.current.end()
        return state

    def _release(self, state: State, status: int | None = None) -> Plan[None]:
        """Give back without an answer; and tell where what should be undone now had been committed."""
        was_open = yield from transaction.abandon()
        if state is State.CLAIMED and was_open:
            self._note(Outcome.RELEASED, status=status)
        elif state is State.CLAIMED:
            detail = "the handler ended the claim's transaction, and failed"
            self._note(Outcome.TORN, status=status, detail=detail)

    # --- answers -------------------------------------------------------------------------------

    def refusal(self, error: TaptwiceError) -> Answer:
        """The problem document for an error of ours, noted as the outcome of this request."""
        _ = self._end()
        if (outcome := next((name for kind, name in _OUTCOMES if isinstance(error, kind)), None)) is not None:
            self._note(outcome, detail=error.detail)
        status, headers, body = problem(
            error, base=self.settings.problems, status=self.policy.status.get(error.problem)
        )
        if error.retry:
            headers = (*headers, ("Retry-After", retry_after(self.policy.retry_after)))
        return Answer(status, (*headers, ("Cache-Control", "no-store")), body)

    def unhandled(self, error: BaseException) -> Answer | None:
        """The edge's own 500, where the policy saves it; None: the error is to go on."""
        if self.policy.save != "all-after-start" or not isinstance(error, Exception):
            return None
        logger.error("unhandled error in %s", self.request.route, exc_info=error)
        self.raised = True
        status, headers, body = problem(TaptwiceError(), base=self.settings.problems)
        return Answer(status, headers, body)

    def _replay(self, saved: Answer) -> Answer:
        headers = saved.headers
        if saved.body is None:
            # A body of another length than its media type promises would only be parsed, and fail.
            headers = (*((n, v) for n, v in headers if n.lower() != "content-type"), OMITTED)
        if saved.header("Cache-Control") is None:
            headers = (*headers, ("Cache-Control", "no-store"))
        headers = (*headers, (self.policy.replay_header, "true"))
        if self.request.has("Origin"):
            exposed = f"{self.policy.replay_header}, Retry-After"
            headers = (*headers, ("Access-Control-Expose-Headers", exposed))
        return Answer(saved.status, headers, saved.body or b"")

    # --- events --------------------------------------------------------------------------------

    def _note(self, outcome: Outcome, **more: Any) -> None:
        if not is_heard(outcome, self.settings.listeners):
            return
        if self._shown is None:
            shown = self.settings.shown
            account = None if self._account is None else shown(self._account)
            key = None if self._key is None else shown(self._key)
            self._shown = account, key, f"{self.request.method} {self.request.route}"
        self._events.append(Event(outcome, *self._shown, **more))

    def emit(self) -> None:
        """Tell what happened. Called when no transaction of this exchange is open any more."""
        for stray in self.current.strays:
            self._note(Outcome.STRAY, detail=stray)
        self.current.strays.clear()
        if self._events:
            events, self._events = self._events, []
            emit(events, self.settings.listeners)


def refused(settings: Settings, policy: Policy, request: Request, error: TaptwiceError) -> Answer:
    """The answer to a request that does not come as far as its claim."""
    exchange = Exchange(settings, policy, request)
    answer = exchange.refusal(error)
    exchange.emit()
    return answer


_OUTCOMES: tuple[tuple[type[TaptwiceError], Outcome], ...] = (
    (KeyMissing, Outcome.MISSING),
    (AccountMissing, Outcome.MISSING),
    (KeyInvalid, Outcome.INVALID),
    (KeyExpired, Outcome.INVALID),
    (KeyReused, Outcome.MISMATCH),
    (InFlight, Outcome.IN_FLIGHT),
    (StoreUnavailable, Outcome.STORE_UNAVAILABLE),
)


def _missing(policy: Policy) -> str:
    if policy.key_pointer is not None:
        return f"An idempotency key is required at {policy.key_pointer} of the JSON body."
    return f"An {policy.key.names[0]} header is required."
