"""One request from its key to its answer, on the database in memory: no framework, no loop, no server."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from taptwice.core.model import Answer, key_hash
from taptwice.core.plan import Command, Plan, Query, run
from taptwice.core.policy import Policy
from taptwice.errors import CommitUnknown, Contention, InFlight, Misuse, StoreUnavailable, Torn
from taptwice.events import Event, Outcome
from taptwice.http.exchange import Exchange
from taptwice.http.request import NotSaved, Request
from taptwice.http.settings import Settings
from taptwice.stores.memory import MemoryDatabase, MemoryExecutor


class Broken:
    """A source whose executors fail at a command."""

    dialect = "postgresql"
    blocking = True

    def __init__(self, database: MemoryDatabase, at: type[Command[Any]] | str, error: Exception) -> None:
        self.database, self.at, self.error = database, at, error

    def open(self) -> MemoryExecutor:
        executor = self.database.open()
        carry_out = executor.execute

        def execute(command: Command[Any]) -> Any:
            name = command.statement if isinstance(command, Query) else type(command).__name__
            if name == self.at:
                raise self.error
            return carry_out(command)

        executor.execute = execute  # type: ignore[method-assign]
        return executor


class Desk:
    """Requests to one service."""

    def __init__(self, source: Any = None, policy: Policy | None = None, **settings: Any) -> None:
        self.database = MemoryDatabase(lock_timeout=0)
        self.events: list[Event] = []
        self.policy = policy or Policy(wait=0)
        self.settings = Settings(
            source(self.database) if source else self.database,
            listeners=[self.events.append],
            show=True,
            **settings,
        )

    def open(self, key: str | None = "k", body: bytes = b"{}", **more: Any) -> Exchange:
        headers = [(b"content-type", b"application/json"), *more.pop("headers", [])]
        if key is not None:
            headers.append((b"idempotency-key", key.encode()))
        given = {"method": "POST", "path": b"/charges", "route": "/charges", "query": b"", **more}
        return Exchange(self.settings, self.policy, Request(headers=headers, body=body, **given))

    def drive(self, exchange: Exchange, plan: Plan[Any]) -> Any:
        return run(plan, lambda command: exchange.executor.execute(command))

    def claim(self, exchange: Exchange, account: Any = "acct") -> Answer | None:
        answer: Answer | None = self.drive(exchange, exchange.claim(account))
        return answer

    def conclude(self, exchange: Exchange, answer: Answer) -> Answer | None:
        instead: Answer | None = self.drive(exchange, exchange.conclude(answer))
        exchange.emit()
        return instead

    def serve(self, status: int = 201, account: Any = "acct", **request: Any) -> Answer:
        """A whole request, which charges."""
        exchange = self.open(**request)
        refused = self.claim(exchange, account)
        if refused is not None:
            exchange.emit()
            return refused
        exchange.executor.handle.insert("charges", exchange.request.body)
        done = Answer(status, (("Content-Type", "text/plain"), ("Set-Cookie", "a=1")), b"done")
        return self.conclude(exchange, done) or done

    @property
    def charges(self) -> int:
        return len(self.database.rows("charges"))

    @property
    def outcomes(self) -> list[Outcome]:
        return [event.outcome for event in self.events]


def problem_of(answer: Answer) -> str:
    name: str = answer.json()["type"].rpartition("/")[2]
    return name


def test_new_then_replayed() -> None:
    desk = Desk()
    first, again = desk.serve(), desk.serve()
    assert (first.status, again.status, again.body) == (201, 201, b"done")
    assert again.headers == (
        ("content-type", "text/plain"),
        ("Cache-Control", "no-store"),
        ("Idempotent-Replayed", "true"),
    )
    assert desk.charges == 1
    assert [(event.outcome, event.status) for event in desk.events] == [
        (Outcome.NEW, None),
        (Outcome.FINISHED, 201),
        (Outcome.REPLAYED, 201),
    ]
    assert {(event.account, event.key, event.route, event.pending) for event in desk.events} == {
        ("acct", "k", "POST /charges", False)
    }


@pytest.mark.parametrize(
    "more",
    [{"body": b'{"a":1}'}, {"path": b"/other"}, {"query": b"a=1"}, {"method": "PATCH"}],
    ids=lambda more: next(iter(more)),
)
def test_another_request_under_the_same_key(more: dict[str, Any]) -> None:
    desk = Desk()
    desk.serve()
    answer = desk.serve(**more)
    assert (answer.status, problem_of(answer)) == (422, "key-reused")
    assert answer.header("Cache-Control") == "no-store"
    assert answer.header("Retry-After") is None
    assert desk.charges == 1
    assert desk.outcomes[-1] is Outcome.MISMATCH


def test_another_account_is_another_key() -> None:
    desk = Desk()
    assert [desk.serve(account=account).status for account in ("a", "b", "a")] == [201, 201, 201]
    assert desk.charges == 2


def test_the_scope_of_a_route() -> None:
    desk = Desk(policy=Policy(wait=0, scope="route"))
    for route in ("/charges", "/refunds", "/charges"):
        assert desk.serve(route=route, path=route.encode()).status == 201
    assert desk.charges == 2


def test_in_flight_and_the_words_for_it() -> None:
    desk = Desk(policy=Policy(wait=0, retry_after=7, status={"in-progress": 425}))
    holder = desk.open()
    assert desk.claim(holder) is None
    refused = desk.serve()
    assert (refused.status, problem_of(refused), refused.header("Retry-After")) == (425, "in-progress", "7")
    assert json.loads(refused.body or b"")["status"] == 425
    assert desk.outcomes == [Outcome.IN_FLIGHT]
    desk.drive(holder, holder.abandon())
    holder.emit()
    assert desk.outcomes[-1] is Outcome.RELEASED
    assert desk.serve().status == 201


@pytest.mark.parametrize("account", [None, ""])
def test_nobody(account: str | None) -> None:
    desk = Desk()
    answer = desk.serve(account=account)
    assert (answer.status, problem_of(answer)) == (401, "account-missing")
    assert (desk.charges, desk.outcomes) == (0, [Outcome.MISSING])


def test_nobody_with_a_random_key_where_that_is_the_policy() -> None:
    desk = Desk(policy=Policy(wait=0, anonymous="shared-uuid"))
    assert problem_of(desk.serve(account=None)) == "key-invalid"
    key = str(uuid.uuid4())
    assert [desk.serve(account=None, key=key).status for _ in range(2)] == [201, 201]
    assert desk.charges == 1


@pytest.mark.parametrize("account", [7, b"acct", "a\0b", ["acct"]])
def test_an_account_that_cannot_be_one_is_the_programs_mistake(account: Any) -> None:
    with pytest.raises(Misuse, match="account"):
        Desk().serve(account=account)


def test_a_missing_key() -> None:
    desk = Desk()
    assert problem_of(desk.serve(key=None)) == "key-missing"
    optional = Desk(policy=Policy(required=False))
    assert [optional.serve(key=None).status for _ in range(2)] == [201, 201]
    assert (optional.charges, optional.database.records, optional.events) == (2, [], [])


@pytest.mark.parametrize("status", [429, 500])
def test_without_a_key_what_would_not_be_saved_is_undone_too(status: int) -> None:
    desk = Desk(policy=Policy(required=False))
    desk.serve(status, key=None)
    assert desk.charges == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"request":{"ids":["a","k"]}}', 201),
        (b'{"request":{"ids":["a"]}}', 400),
        (b'{"request":{"ids":["a",""]}}', 400),
        (b'{"request":{"ids":["a",7]}}', 400),
        (b'{"request":[]}', 400),
        (b"[" * 20_000, 400),
        (b'{"request":{"ids":["a","k"]},"more":[' + b"1," * 100_000 + b"1]}", 400),
        (b"no json", 400),
        (b"", 400),
    ],
)
def test_a_key_in_the_body(body: bytes, expected: int) -> None:
    desk = Desk(policy=Policy(wait=0, key_pointer="/request/ids/1"))
    assert desk.serve(key=None, body=body).status == expected
    assert desk.charges == (expected == 201)


@pytest.mark.parametrize(
    ("body", "expected"), [(b"", 201), (b"{}", 201), (b"no json", 400), (b'{"k":7}', 400)]
)
def test_where_none_is_required_what_cannot_be_read_is_no_missing_key(body: bytes, expected: int) -> None:
    desk = Desk(policy=Policy(wait=0, key_pointer="/k", required=False))
    assert desk.serve(key=None, body=body).status == expected


def test_a_key_older_than_the_window() -> None:
    now = 1_800_000_000.0
    desk = Desk(policy=Policy(wait=0, uuid7_guard=True, window="1h"), clock=lambda: now)

    def key(age: float) -> str:
        milliseconds = int((now - age) * 1000)
        return str(uuid.UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62) | 1))

    assert problem_of(desk.serve(key=key(3700))) == "key-expired"
    assert desk.serve(key=key(3500)).status == 201
    assert desk.serve(key=str(uuid.uuid4())).status == 201


def test_an_origin_may_read_the_header() -> None:
    desk = Desk()
    desk.serve()
    answer = desk.serve(headers=[(b"Origin", b"https://shop.test")])
    assert answer.header("Access-Control-Expose-Headers") == "Idempotent-Replayed, Retry-After"


def test_a_tombstone() -> None:
    desk = Desk(policy=Policy(wait=0, save_max_body=3))
    desk.serve()
    again = desk.serve()
    assert (again.status, again.body, again.header("Content-Type")) == (201, b"", None)
    assert again.header("Idempotent-Body") == "omitted"


def test_raised_is_undone_and_saved() -> None:
    desk = Desk()
    exchange = desk.open()
    assert desk.claim(exchange) is None
    exchange.executor.handle.insert("charges", 1)
    exchange.raised = True
    assert desk.conclude(exchange, Answer(402)) is None
    assert desk.charges == 0
    assert desk.serve().status == 402
    assert desk.charges == 0


def test_not_saved_is_undone_whatever_its_status() -> None:
    desk = Desk()
    exchange = desk.open()
    assert desk.claim(exchange) is None
    exchange.executor.handle.insert("charges", 1)
    exchange.not_saved = True
    assert desk.conclude(exchange, Answer(200)) is None
    assert (desk.charges, desk.database.records) == (0, [])
    assert desk.outcomes == [Outcome.NEW, Outcome.RELEASED]
    assert NotSaved("answer").answer == "answer"


def test_claimed_twice() -> None:
    desk = Desk()
    exchange = desk.open()
    desk.claim(exchange)
    with pytest.raises(Misuse, match="claimed already"):
        desk.claim(exchange)


def test_abandoned_in_any_state() -> None:
    desk = Desk()
    fresh = desk.open()
    desk.drive(fresh, fresh.abandon())
    exchange = desk.open()
    desk.claim(exchange)
    for _ in range(2):
        desk.drive(exchange, exchange.abandon())
    exchange.emit()
    assert (desk.outcomes, desk.database.transactions) == ([Outcome.NEW, Outcome.RELEASED], [])


@pytest.mark.parametrize(
    ("at", "error", "status", "outcomes"),
    [
        ("Begin", StoreUnavailable(), 503, [Outcome.STORE_UNAVAILABLE]),
        ("claim", StoreUnavailable(), 503, [Outcome.STORE_UNAVAILABLE]),
        ("claim", InFlight(), 409, [Outcome.IN_FLIGHT]),
        ("insert", StoreUnavailable(), 503, [Outcome.NEW, Outcome.STORE_UNAVAILABLE]),
        ("insert", Contention(), 503, [Outcome.NEW, Outcome.RELEASED]),
        ("Commit", CommitUnknown(), 503, [Outcome.NEW, Outcome.STORE_UNAVAILABLE]),
    ],
)
def test_a_store_that_fails(at: str, error: Any, status: int, outcomes: list[Outcome]) -> None:
    """Nothing is done, the caller is told to come again, and every claim comes to an end in the events."""
    desk = Desk(lambda database: Broken(database, at, error))
    answer = desk.serve()
    assert answer.status == status
    assert answer.header("Retry-After") == "1"
    assert desk.outcomes == outcomes
    assert (desk.charges, desk.database.transactions) == (0, [])


def test_an_error_of_the_users_at_the_commit_is_his() -> None:
    desk = Desk(lambda database: Broken(database, "Commit", ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        desk.serve()
    assert desk.charges == 0


@pytest.mark.parametrize("strict", [False, True])
def test_torn(strict: bool) -> None:
    """The handler commits by itself: its answer is saved at once; strict raises, after that."""
    desk = Desk(strict=strict)
    exchange = desk.open()
    desk.claim(exchange)
    exchange.executor.handle.insert("charges", 1)
    exchange.executor.handle.commit()
    if strict:
        with pytest.raises(Torn):
            desk.conclude(exchange, Answer(201))
    else:
        assert desk.conclude(exchange, Answer(201)) is None
    exchange.emit()
    assert Outcome.TORN in desk.outcomes
    assert desk.serve().header("Idempotent-Replayed") == "true"
    assert desk.charges == 1


def test_torn_and_the_answer_cannot_be_saved() -> None:
    """The work is committed: nobody is told that nothing was done."""
    desk = Desk(source=lambda database: Broken(database, "insert_late", StoreUnavailable("gone")))
    exchange = desk.open()
    desk.claim(exchange)
    exchange.executor.handle.insert("charges", 1)
    exchange.executor.handle.commit()
    instead = desk.conclude(exchange, Answer(201))
    assert instead is not None
    assert (instead.status, problem_of(instead), desk.charges) == (503, "commit-unknown", 1)
    assert "the work is committed" in (desk.events[-1].detail or "")


def test_strays_are_told() -> None:
    desk = Desk()
    exchange = desk.open()
    exchange.current.strays.append("a session outside")
    exchange.emit()
    assert [(event.outcome, event.detail) for event in desk.events] == [(Outcome.STRAY, "a session outside")]


def test_hidden_unless_shown() -> None:
    settings = Settings(MemoryDatabase())
    assert settings.shown("acct") == key_hash("acct") != "acct"


def test_an_origin_that_is_none_is_refused_where_it_is_written() -> None:
    with pytest.raises(Misuse, match="cannot take connections"):
        Settings(object())
