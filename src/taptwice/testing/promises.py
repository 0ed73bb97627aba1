"""What a method promises (RFC 9110, section 9.2): GET has no effect, PUT and DELETE none when sent again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

from taptwice.core.plan import Plan, ask
from taptwice.errors import Misuse
from taptwice.testing.calls import Answer, Call, Outcome
from taptwice.testing.effects import Counting, change, words
from taptwice.testing.sending import Opening, Read, Requesting, Verdict, judged, send

Response = TypeVar("Response")

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
PROMISING = (*sorted(SAFE), "PUT", "DELETE")


@overload
def assert_idempotent(
    client: Requesting[Response], method: str, url: str, /, *, effects: Counting, **options: Any
) -> Response: ...


@overload
def assert_idempotent(
    client: Opening[Response], method: str, url: str, /, *, effects: Counting, **options: Any
) -> Response: ...


def assert_idempotent(client: Any, method: str, url: str, /, *, effects: Counting, **options: Any) -> Any:
    """Send this request twice, without a key: the second must have no effect, of a safe method the first too.

    The answers may differ: the second DELETE may be a 404. A first PUT or DELETE that has no effect proves
    nothing, and fails. The arguments and what comes back are those of `assert_once`.
    """
    __tracebackhide__ = True
    call = Call(method.upper(), url, options)
    if call.method not in PROMISING:
        raise Misuse(f"{call.method} promises nothing: give it a key, and use assert_once")
    return judged(_promise(call, effects), client)


def _promise(call: Call, effects: Counting) -> Plan[Verdict]:
    safe = call.method in SAFE
    before = yield from ask(Read(effects))
    first = yield from send(call)
    after = yield from ask(Read(effects))
    effect = change(before, after)
    if isinstance(first, BaseException):
        return Verdict(f"{call} failed", [], first)
    if first.status >= 400:
        return Verdict(f"{call} proves nothing", [f"the first request was answered {first}"], first)
    if not (safe or effect):
        return Verdict(
            f"{call} proves nothing",
            [f"the first request was answered {first.status}, and had no effect that `effects` counts"],
            first,
        )
    again = yield from send(call)
    extra = change(after, (yield from ask(Read(effects))))
    failures = (
        [] if not safe or not effect else [f"{call.method} is safe, and had an effect: {words(effect)}"]
    )
    if extra:
        failures.append(f"sent again: one more effect: {words(extra)}")
    failures += _failed(again)
    return Verdict(f"{call} does not keep what {call.method} promises", failures, first)


def _failed(again: Outcome) -> Iterator[str]:
    if not isinstance(again, Answer):
        yield f"sent again: the client raised {again!r}"
    elif again.status >= 500:
        yield f"sent again: {again}"


def promised(app: Any, examples: Mapping[str, Mapping[str, Any] | None] | None = None) -> list[Call]:
    """A request for each route of a FastAPI, Starlette or Flask application whose method promises something.

    `examples` gives, for ``"PUT /wallets/{owner}"``, its ``"url"`` and other options of the client; None
    leaves a route out. A route with parameters, and any PUT or DELETE, needs one. For pytest:

        @pytest.mark.parametrize("call", promised(app, EXAMPLES), ids=str)
        def test_promise(call, assert_idempotent):
            assert_idempotent(call.method, call.url, **call.options)

    Raises `Misuse` for routes without an example, and for examples without a route.
    """
    examples = examples or {}
    routes = {f"{method} {path}": (method, path) for method, path in _routes(app)}
    if unknown := sorted(set(examples) - set(routes)):
        raise Misuse(f"no route {', '.join(unknown)}; there are {', '.join(sorted(routes))}")
    missing = [
        name
        for name, (method, path) in routes.items()
        if name not in examples and (method not in SAFE or any(mark in path for mark in "{<"))
    ]
    if missing:
        raise Misuse(f"give an example (or None, to leave it out) of: {', '.join(missing)}")
    calls = []
    for name, (method, path) in routes.items():
        example = examples.get(name, {})
        if example is not None:
            options = dict(example)
            calls.append(Call(method, options.pop("url", path), options))
    return calls


def _routes(app: Any) -> Iterator[tuple[str, str]]:
    """Methods and paths, as declared."""
    if hasattr(app, "url_map"):  # Flask
        declared: Iterable[tuple[str, Iterable[str]]] = [
            (rule.rule, rule.methods or ()) for rule in app.url_map.iter_rules()
        ]
    elif hasattr(app, "routes"):
        declared = _declared(app.routes)
    else:
        raise Misuse(f"{type(app).__name__} shows no routes: list its requests yourself")
    for path, methods in declared:
        found = set(methods) & set(PROMISING) - {"OPTIONS", "TRACE"}
        if "GET" in found:
            found.discard("HEAD")  # the framework's own, by the same function
        yield from ((method, path) for method in sorted(found))


def _declared(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Iterable[str]]]:
    for route in routes:
        if hasattr(route, "effective_route_contexts"):  # a router that FastAPI included
            yield from _declared(route.effective_route_contexts(), prefix)
        elif getattr(route, "methods", None):
            yield prefix + route.path, route.methods
        elif getattr(route, "routes", None):
            yield from _declared(route.routes, prefix + route.path)
