"""Every point at which the process may die while a request is claimed, done and finished."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar, overload

from taptwice.core.plan import Close, Command, Plan, Query, Rollback, ask
from taptwice.core.policy import Policy
from taptwice.drivers import Source
from taptwice.errors import Misuse
from taptwice.faults import Fault, Kind
from taptwice.faults.commands import AsyncFaultyExecutor, Fate, FaultyExecutor
from taptwice.http.settings import Settings
from taptwice.sql import Dialect
from taptwice.testing.calls import Answer, Call, Outcome, answered, differences, new_key
from taptwice.testing.effects import Counting, change, words
from taptwice.testing.repeats import repeated, unproven
from taptwice.testing.sending import Opening, Read, Requesting, Verdict, judged, send

Response = TypeVar("Response")

RETRIES = 3


@overload
def assert_crash_safe(
    client: Requesting[Response],
    method: str,
    url: str,
    /,
    *,
    once: Settings,
    effects: Counting,
    kinds: Sequence[Kind] = tuple(Kind),
    policy: Policy | None = None,
    **options: Any,
) -> Response: ...


@overload
def assert_crash_safe(
    client: Opening[Response],
    method: str,
    url: str,
    /,
    *,
    once: Settings,
    effects: Counting,
    kinds: Sequence[Kind] = tuple(Kind),
    policy: Policy | None = None,
    **options: Any,
) -> Response: ...


def assert_crash_safe(
    client: Any,
    method: str,
    url: str,
    /,
    *,
    once: Settings,
    effects: Counting,
    kinds: Sequence[Kind] = tuple(Kind),
    policy: Policy | None = None,
    **options: Any,
) -> Any:
    """Let the process die, or the connection break, at each command of the claim and the finish in turn.

    After each fault the client sends its request again, twice: there must be one effect, that of a request
    to which nothing happened, and one answer. Each point has a new key. A fault is as `taptwice.faults` has
    it: the process lives on, but what it was doing is over and its connections are closed.

    `once` is the application's `Idempotency`: the application must run in this process, and be sent nothing
    else meanwhile. `policy`: that of the route, where it is not that of `once`. The other arguments and what
    comes back are those of `assert_once`. Raises AssertionError with every point that is not safe.
    """
    __tracebackhide__ = True
    call = Call(method.upper(), url, options)
    return judged(_each_point(call, once, effects, kinds, policy or once.policy), client)


def _each_point(
    call: Call, once: Settings, effects: Counting, kinds: Sequence[Kind], policy: Policy
) -> Plan[Verdict]:
    before = yield from ask(Read(effects))
    first = answered((yield from send(call.keyed(policy, new_key()))))
    effect = change(before, (yield from ask(Read(effects))))
    if problem := unproven(first, effect):
        return Verdict(f"{call} proves nothing", [problem], first)
    failures: list[str] = []
    points = 0
    for number in count(1):
        reached = False
        for kind in kinds:
            keyed = call.keyed(policy, new_key())
            before = yield from ask(Read(effects))
            with _doomed(once, Fault(kind, number)) as fate:
                outcome = yield from send(keyed)
            reached = reached or len(fate.commands) >= number
            if not fate.struck:
                continue
            points += 1
            retry = yield from _retry(keyed)
            again = yield from send(keyed)
            found = change(before, (yield from ask(Read(effects))))
            seen = None if fate.dead else outcome
            point = f"command {number} ({_name(fate.commands[number - 1])}), {kind.value}"
            if found != effect:
                failures.append(f"{point}: effect: expected {words(effect)}, found {words(found)}")
            failures += (f"{point}: {text}" for text in _unsafe(first, seen, retry, again, policy))
        if not reached:
            break
    if not points:
        failures.append("no claim was made through `once`: is it this application's, and the route keyed?")
    return Verdict(f"{call} does not survive", failures, first)


def _unsafe(
    first: Answer, seen: Outcome | None, retry: Outcome, again: Outcome, policy: Policy
) -> Iterator[str]:
    """What is wrong with the answers after a fault. `first` is one without a fault; `seen` is what the client
    got at the fault, None where the process died.
    """
    if not isinstance(retry, Answer) or retry.status >= 500:
        yield f"the retry failed: {retry if isinstance(retry, Answer) else repr(retry)}"
        return
    if retry.status != first.status:
        yield f"the retry: status: expected {first.status} as without a fault, found {retry}"
    if isinstance(seen, Answer) and seen.status < 500 and policy.keeps(seen.status):
        yield from (f"the retry, after an answer: {text}" for text in differences(seen, retry, policy))
        if not retry.replayed(policy):
            yield f"{policy.replay_header} is missing on the retry, after an answer: {seen}"
    if not isinstance(again, Answer):
        yield f"the second retry failed: {again!r}"
        return
    as_first = (
        repeated(retry, again, policy) if not retry.replayed(policy) else differences(retry, again, policy)
    )
    yield from (f"the second retry: {text}" for text in as_first)


def _retry(keyed: Call) -> Plan[Outcome]:
    """Send again, as a client does that has a key: also where its connection broke."""
    outcome: Outcome = ConnectionError()
    for _ in range(RETRIES):
        outcome = yield from send(keyed)
        if isinstance(outcome, Answer) or not _is_lost(outcome):
            break
    return outcome


def _is_lost(error: BaseException) -> bool:
    """Whether there was no answer: httpx's errors of transport, those of requests and of sockets."""
    return isinstance(error, OSError) or any(
        kind.__name__ == "TransportError" for kind in type(error).__mro__
    )


def _name(command: Command[Any]) -> str:
    return command.statement if isinstance(command, Query) else type(command).__name__.lower()


class ProcessDied(Exception):
    """What the surroundings of the edge see of a crash: a server's task groups would not survive more."""


class DoomedSource:
    """The source of `once` under a fate. It is looked up inside the request, as Flask's must be."""

    def __init__(self, once: Any, fault: Fault) -> None:
        self.fate = Fate(fault)
        self._once = once
        self._found: Source | None = None

    @property
    def _source(self) -> Source:
        if self._found is None:
            self._once.bound = None
            try:
                self._found = self._once.source
            finally:
                self._once.bound = self
        return self._found

    @property
    def dialect(self) -> Dialect:
        return self._source.dialect

    @property
    def blocking(self) -> bool:
        return self._source.blocking

    def open(self) -> Any:
        executor = self._source.open()
        self.fate.lent.append(executor)
        return (_Doomed if self.blocking else _AwaitingDoomed)(executor, self.fate)


class _Doomed(FaultyExecutor):
    """What a dead process gives back is nothing: of that, the edge must not be told a second time."""

    def execute(self, command: Command[Any], /) -> Any:
        gives_back = isinstance(command, Rollback | Close)
        return None if self.fate.dead and gives_back else super().execute(command)


class _AwaitingDoomed(AsyncFaultyExecutor):
    async def execute(self, command: Command[Any], /) -> Any:
        gives_back = isinstance(command, Rollback | Close)
        return None if self.fate.dead and gives_back else await super().execute(command)


@contextmanager
def _doomed(once: Any, fault: Fault) -> Iterator[Fate]:
    """Inside this block a request of `once` meets the fault."""
    if once.bound is not None:
        raise Misuse("this Idempotency is bound to the test's connection, which does not die with a process")
    doomed = once.bound = DoomedSource(once, fault)
    serve = once.serve
    if inspect.iscoroutinefunction(serve):
        once.serve = _contained(serve, doomed.fate)
    try:
        yield doomed.fate
    finally:
        once.bound = None
        vars(once).pop("serve", None)


def _contained(serve: Callable[..., Any], fate: Fate) -> Callable[..., Any]:
    async def contained(*arguments: Any, **options: Any) -> None:
        try:
            await serve(*arguments, **options)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not fate.dead:
                raise
            raise ProcessDied("the process died here (injected)") from error

    return contained
