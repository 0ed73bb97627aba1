"""A request that is sent again has one effect and one answer: in turn, at once, and with another body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from taptwice.core.plan import Plan, ask
from taptwice.core.policy import Policy
from taptwice.testing.calls import Answer, Call, Outcome, answered, differences, new_key
from taptwice.testing.effects import Change, Counting, change, words
from taptwice.testing.sending import Opening, Read, Requesting, Send, Verdict, judged, send

Response = TypeVar("Response")

AT_ONCE = 5
ROUNDS = 10
"""One round finds a check before the insert, on SQLite without a pause between them, two times in five."""
REUSED = "key-reused"


@overload
def assert_once(
    client: Requesting[Response],
    method: str,
    url: str,
    /,
    *,
    effects: Counting,
    at_once: int = AT_ONCE,
    rounds: int = ROUNDS,
    changed: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Response: ...


@overload
def assert_once(
    client: Opening[Response],
    method: str,
    url: str,
    /,
    *,
    effects: Counting,
    at_once: int = AT_ONCE,
    rounds: int = ROUNDS,
    changed: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Response: ...


def assert_once(
    client: Any,
    method: str,
    url: str,
    /,
    *,
    effects: Counting,
    at_once: int = AT_ONCE,
    rounds: int = ROUNDS,
    changed: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Any:
    """Send this request twice in turn with one new key, changed with that key, and several times at once.

    Each time there must be one effect, that of the first request, and one answer: its status, body and saved
    headers, again with the replay marker. The changed request is refused (422 `key-reused`) and does nothing.

    `effects` counts effects, `Effects` of a database or a function of yours. `options` are the client's own
    (``json=``, ``headers=``, …). `changed`: the options in which another request differs; unless told, a
    number of its body or query is another. `policy`: that of the route, where it is not the default.
    `at_once` requests are sent together in each of `rounds`, each with a new key: a race is a matter of luck,
    and of as many chances. 1 sends in turn only, which proves little: a check before the insert passes that.

    Gives back the client's response to the first request; awaitable where the client awaits. Raises
    AssertionError with every difference that was found, and what the client itself raises.
    """
    __tracebackhide__ = True
    call = Call(method.upper(), url, options)
    return judged(
        _once(call, effects, at_once, rounds if at_once > 1 else 0, changed, policy or Policy()), client
    )


def _once(
    call: Call,
    effects: Counting,
    at_once: int,
    rounds: int,
    changes: Mapping[str, Any] | None,
    policy: Policy,
) -> Plan[Verdict]:
    key = new_key()
    keyed = call.keyed(policy, key)
    before = yield from ask(Read(effects))
    first = answered((yield from send(keyed)))
    after = yield from ask(Read(effects))
    effect = change(before, after)
    if problem := unproven(first, effect):
        return Verdict(f"{call} proves nothing", [problem], first)
    failures: list[str] = []

    again = answered((yield from send(keyed)))
    failures += (f"sent again: {text}" for text in repeated(first, again, policy))
    reading = yield from ask(Read(effects))
    if extra := change(after, reading):
        failures.append(f"sent again: one more effect: {words(extra)}")

    other = answered((yield from send(call.changed(changes).keyed(policy, key))))
    failures += (f"changed, same key: {text}" for text in _refused(other, policy))
    last = yield from ask(Read(effects))
    if extra := change(reading, last):
        failures.append(f"changed, same key: an effect: {words(extra)}")

    for _ in range(rounds):
        keyed = call.keyed(policy, new_key())
        answers = yield from _together(keyed, at_once)
        reading = yield from ask(Read(effects))
        wrong = [*_agreeing(answers, first, policy)]
        if (found := change(last, reading)) != effect:
            wrong.append(f"effect: expected {words(effect)}, found {words(found)}")
        last = reading
        if wrong:
            failures += (f"{at_once} at once: {text}" for text in wrong)
            break
    if failures and first.status in _DOUBTS:
        failures.insert(0, f"the first request was answered {first.status}: {_DOUBTS[first.status]}")
    return Verdict(f"{call} does not happen once", failures, first)


_DOUBTS = {404: "is the path right?", 405: "is the method right?", 422: "is the request valid?"}
"""First answers that are seldom what a test wants to see repeated."""


def unproven(first: Answer, effect: Change) -> str | None:
    """Why repeating this request shows nothing, if so."""
    if first.status >= 500:
        return f"the first request failed: {first}"
    if first.status < 400 and not effect:
        return f"the first request was answered {first.status}, and had no effect that `effects` counts"
    return None


def repeated(first: Answer, again: Answer, policy: Policy) -> Iterator[str]:
    """What is wrong with the second answer to one request."""
    if first.replayed(policy):
        yield f"{policy.replay_header} is on the first answer, to a key that is new"
    yield from differences(first, again, policy)
    if again.status == first.status and not again.replayed(policy):
        yield f"{policy.replay_header} is missing on {again}: done again, or not an answer that is saved"


def _refused(other: Answer, policy: Policy) -> Iterator[str]:
    wanted = policy.status.get(REUSED, 422)
    if other.status != wanted:
        yield f"expected {wanted} {REUSED}, found {other}"
    elif other.problem != REUSED:
        yield (
            f"was refused before its key was looked at: {other}; give another valid request, "
            "changed={…} with options of the client"
        )


def _together(keyed: Call, number: int) -> Plan[Sequence[Outcome]]:
    """Send at once; whoever is told that the first is in progress asks again when all have their answer."""
    outcomes: Sequence[Outcome] = yield from ask(Send((keyed,) * number))
    settled: list[Outcome] = []
    for outcome in outcomes:
        in_progress = isinstance(outcome, Answer) and outcome.problem == "in-progress"
        settled.append((yield from send(keyed)) if in_progress else outcome)
    return settled


def _agreeing(outcomes: Sequence[Outcome], like: Answer, policy: Policy) -> Iterator[str]:
    """What is wrong with the answers to one request that was sent several times at once."""
    answers: dict[int, Answer] = {}
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, Answer):
            answers[number] = outcome
        else:
            yield f"request {number}: the client raised {outcome!r}"
    done = [answer for answer in answers.values() if not answer.replayed(policy)]
    if len(done) != 1:
        yield f"answers without {policy.replay_header}: expected 1, found {len(done)}"
    if not answers:
        return
    first = (done or [*answers.values()])[0]
    if first.status != like.status:
        yield f"status: expected {like.status} as in turn, found {first}"
    for number, answer in answers.items():
        yield from (f"request {number}: {text}" for text in differences(first, answer, policy))
