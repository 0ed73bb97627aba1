"""A client whose every request that changes something arrives twice, as on a bad day."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from random import Random
from typing import Any
from urllib.parse import urlsplit

from taptwice.core.plan import Plan, arun, ask, run
from taptwice.core.policy import Policy
from taptwice.testing.calls import Answer, Call, Outcome, answered, differences, new_key
from taptwice.testing.sending import UNDOUBLED, Send, awaits, method_of, send, sender

CHANGING = ("POST", "PUT", "PATCH", "DELETE")

AT_ONCE = 1 / 3
"""The share of requests whose two attempts are sent at once; the others are sent in turn."""


class Doubling:
    """How requests are doubled, and how many were."""

    def __init__(self, random: Random, policy: Policy, skip: Collection[str]) -> None:
        self.random = random
        self.policy = policy
        self.skip = skip
        self.active = True
        self.sent_twice = 0
        self.at_once = 0

    def plan(self, call: Call) -> Plan[Outcome]:
        """Send once or twice; what the test gets is the answer of the attempt that was carried out."""
        if not (self.active and call.method in CHANGING) or self._is_left_out(call):
            return (yield from send(call))
        keyed = call.method in self.policy.methods
        if keyed and not call.has_key(self.policy):
            call = call.keyed(self.policy, new_key())
        self.sent_twice += 1
        if self.random.random() < AT_ONCE:
            self.at_once += 1
            first, again = yield from ask(Send((call, call)))
        else:
            first = answered((yield from send(call)))
            again = yield from send(call)
        first, again = answered(first), answered(again)
        if again.problem == "in-progress":
            again = answered((yield from send(call)))
        elif first.problem == "in-progress":
            first = answered((yield from send(call)))
        if first.replayed(self.policy):
            first, again = again, first
        if problems := list(self._wrong(first, again, keyed)):
            raise AssertionError("\n  ".join([f"{call}, sent twice:", *problems]))
        return first

    def _is_left_out(self, call: Call) -> bool:
        path = urlsplit(call.url).path
        return any(fnmatchcase(f"{call.method} {path}", pattern) for pattern in self.skip)

    def _wrong(self, first: Answer, again: Answer, keyed: bool) -> Iterator[str]:
        if not keyed:  # PUT and DELETE promise an effect, not an answer
            if again.status >= 500 > first.status:
                yield f"the first answer {first}, the second {again}"
            return
        if again.replayed(self.policy):
            yield from differences(first, again, self.policy)
        elif first.status < 400:
            yield (
                f"carried out twice: the second answer, {again}, has no {self.policy.replay_header}; "
                "a route that takes no key is left out by skip=['METHOD /path']"
            )
        elif again.status != first.status:
            yield f"status: expected {first.status}, found {again}"


@contextmanager
def twice(
    client: Any, *, seed: int | str = 0, policy: Policy | None = None, skip: Collection[str] = ()
) -> Iterator[Doubling]:
    """Inside this block every POST, PUT, PATCH and DELETE of `client` is sent twice, every third at once.

    POST and PATCH get a new key where the test gives none; their second answer must be the first, replayed.
    What else must hold is for the tests to say: they get the answer of the attempt that was carried out, and
    find what one request leaves. `seed` decides which are sent at once. `skip`: patterns of requests that
    take no key, ``"POST /login"``, ``"POST /files/*"``. `policy` as for `assert_once`.

    Not doubled is what bypasses the client's ``request`` (or ``open``): httpx's ``send`` and ``stream``. A
    body that can be read only once, a file or a generator, cannot be sent twice.
    """
    doubling = Doubling(Random(seed), policy or Policy(), skip)
    undo = double(client, doubling)
    try:
        yield doubling
    finally:
        undo()


def double(client: Any, doubling: Doubling) -> Any:
    """Put the doubling in front of this client's requests. Gives back the function that takes it away."""
    name = method_of(client)
    carrying = sender(client)
    before = vars(client).get(name)

    async def awaiting(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        plan = doubling.plan(_call(name, arguments, options))
        return answered(await arun(plan, carrying.execute)).response

    def blocking(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        return answered(run(doubling.plan(_call(name, arguments, options)), carrying.execute)).response

    doubled = awaiting if awaits(client) else blocking
    setattr(doubled, UNDOUBLED, getattr(client, name))
    setattr(client, name, doubled)
    return lambda: delattr(client, name) if before is None else setattr(client, name, before)


def _call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Call:
    if name == "open":
        path = arguments[0] if arguments else options.pop("path", "/")
        return Call(str(options.pop("method", "GET")).upper(), path, options)
    names = ("method", "url")
    given = {**dict(zip(names, arguments, strict=False)), **options}
    method, url = (given.pop(each) for each in names)
    return Call(str(method).upper(), str(url), given)
