"""Flask views on sqlite3, psycopg, SQLAlchemy and Flask-SQLAlchemy; under gunicorn where threads matter."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pathlib
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from flask import Blueprint, Flask, Response, abort, current_app, g, jsonify, request, send_file
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from werkzeug.test import TestResponse

from taptwice.core.model import Answer, key_hash
from taptwice.errors import Misuse
from taptwice.events import Event, Outcome
from taptwice.flows.current import KeyHashFilter
from taptwice.http.flask import Idempotency, NotSaved
from taptwice.http.joined import joined, joined_options, outside
from tests.http.serving import gunicorn

SQLITE = ("sqlite3", "sqlite sessions", "sqlite flask-sqlalchemy")
POSTGRES = ("psycopg", "sessions", "flask-sqlalchemy")
KINDS = SQLITE + POSTGRES
SESSIONS = ("sqlite sessions", "sqlite flask-sqlalchemy", "sessions", "flask-sqlalchemy")
FLASK_SQLALCHEMY = ("sqlite flask-sqlalchemy", "flask-sqlalchemy")


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    note: Mapped[str | None]
    parent: Mapped[int | None]


class TooMuch(Exception):
    """An error of the application's own, answered with 402."""


class Counted(sqlite3.Connection):
    """Knows how many are open."""

    open = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Counted.open += 1

    def close(self) -> None:
        Counted.open -= 1
        super().close()


def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not request.authorization and not request.headers.get("Authorization"):
            abort(401)
        g.account = request.headers["Authorization"]
        return view(*arguments, **named)

    return checked


class Shop:
    """One application with ``POST /charges``, on one kind of database."""

    def __init__(self, kind: str, place: str, pool_size: int = 4) -> None:
        self.kind = kind
        self.place = place
        self.sqlite = kind in SQLITE
        self.events: list[Event] = []
        self.calls = 0
        self.app = Flask("shop")
        self.db: Any = None
        self.origin: Any = None
        self.engine: Any = None
        sizes = {"pool_size": pool_size, "max_overflow": 0}
        url = (
            f"sqlite:///{place}"
            if self.sqlite
            else place.replace("postgresql://", "postgresql+psycopg://", 1)
        )
        if kind == "sqlite3":
            self.origin = self._connect
        elif kind == "psycopg":
            self.origin = psycopg_pool.ConnectionPool(place, min_size=0, max_size=pool_size, open=True)
        elif kind in FLASK_SQLALCHEMY:
            self.app.config.update(SQLALCHEMY_DATABASE_URI=url, SQLALCHEMY_ENGINE_OPTIONS=sizes)
            self.db = SQLAlchemy(self.app, session_options=joined_options())
            with self.app.app_context():
                self.engine = self.db.engine
            self.origin = lambda: self.db.engine
        else:
            self.engine = create_engine(url, **sizes)
            self.origin = sessionmaker(self.engine)
        if self.engine is not None and self.sqlite:
            event.listen(self.engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys = on"))
        self.once = self.idempotency()

        @self.app.errorhandler(TooMuch)
        def too_much(error: TooMuch) -> Any:
            return {"error": str(error)}, 402

    def idempotency(self, **settings: Any) -> Idempotency:
        settings.setdefault("account", lambda: g.account)
        return Idempotency(self.origin, listeners=[self.events.append], **settings)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.place, check_same_thread=False, factory=Counted)
        connection.execute("PRAGMA foreign_keys = on")
        return connection

    def close(self) -> None:
        if self.engine is not None:
            self.engine.dispose()
        elif self.kind == "psycopg":
            self.origin.close()

    def borrowed(self) -> int:
        """Connections that are not back."""
        if self.engine is not None:
            return int(self.engine.pool.checkedout())
        if self.kind == "psycopg":
            stats = self.origin.get_stats()
            return int(stats["pool_size"] - stats["pool_available"])
        return Counted.open

    # --- in a view ---------------------------------------------------------------------------------

    def insert(self, amount: int = 5, note: str | None = None, parent: int | None = None) -> int:
        """A charge, on the connection or session of the claim."""
        if self.kind in SESSIONS:
            with self.session() as session:
                row = Charge(amount=amount, note=note, parent=parent)
                session.add(row)
                session.flush()
                return row.id
        mark = "?" if self.sqlite else "%s"
        statement = f"INSERT INTO charges (amount, note, parent) VALUES ({mark}, {mark}, {mark}) RETURNING id"
        done = self.once.connection().execute(statement, (amount, note, parent))
        return int(done.fetchone()[0])

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        if self.db is not None:
            yield self.db.session
            return
        with self.once.session() as session:
            yield session

    def execute(self, statement: str) -> Any:
        if self.kind in SESSIONS:
            with self.session() as session:
                return session.execute(text(statement))
        return self.once.connection().execute(statement)

    def usual(self) -> Any:
        return {"id": self.insert()}, 201, {"Location": "/charges/1"}

    # --- from outside ------------------------------------------------------------------------------

    def serve(self, view: Callable[[], Any] | None = None, path: str = "/charges", **policy: Any) -> Shop:
        """Add a keyed view, behind a login."""
        view = view or self.usual

        def charge() -> Any:
            self.calls += 1
            return view()

        self.app.post(path, endpoint=path)(login_required(self.once.keyed(**policy)(charge)))
        return self

    def post(
        self, key: str | None = "key-1", path: str = "/charges", amount: int = 5, **options: Any
    ) -> TestResponse:
        options.setdefault("headers", {"Authorization": "acct_1"})
        if key is not None:
            options["headers"] = {**options["headers"], "Idempotency-Key": key}
        if "data" not in options:
            options.setdefault("json", {"amount": amount})
        return self.app.test_client().post(path, **options)

    def query(self, statement: str) -> list[Any]:
        """The truth, as committed."""
        if self.sqlite:
            with contextlib.closing(sqlite3.connect(self.place)) as connection:
                found = connection.execute(statement).fetchall()
        else:
            with psycopg.connect(self.place) as pg:
                found = pg.execute(statement.encode()).fetchall()
        return [row[0] for row in found]

    def rows(self) -> list[int]:
        return self.query("SELECT amount FROM charges ORDER BY id")

    def saved(self) -> list[int]:
        return self.query("SELECT status FROM taptwice_records ORDER BY created_at, id")

    def outcomes(self) -> list[Outcome]:
        return [each.outcome for each in self.events]


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    kind = request.param
    made = Shop(kind, request.getfixturevalue("charges_sqlite" if kind in SQLITE else "charges_postgres"))
    try:
        yield made
        assert made.borrowed() == 0, "a connection was not given back"
    finally:
        made.close()


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shop", kinds or KINDS, indirect=True)


def replayed(answer: TestResponse) -> bool:
    return answer.headers.get("Idempotent-Replayed") == "true"


def problem(answer: Any) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json() if callable(answer.json) else answer.json
    assert document["status"] == answer.status_code
    return str(document["type"].rpartition("/")[2])


def until(condition: Callable[[], bool]) -> None:
    """Wait for what gives no signal of its own."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- the usual course ---------------------------------------------------------------------------------------


@on()
def test_a_retry_gets_the_first_answer(shop: Shop) -> None:
    shop.serve()
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.data == again.data
    assert (replayed(first), replayed(again)) == (False, True)
    assert again.headers["Location"] == "/charges/1"
    assert again.headers["Content-Length"] == str(len(first.data))
    assert again.headers["Cache-Control"] == "no-store"
    assert (shop.rows(), shop.calls, shop.saved()) == ([5], 1, [201])
    assert shop.outcomes() == [Outcome.NEW, Outcome.FINISHED, Outcome.REPLAYED]
    assert shop.events[0].route == "POST /charges"
    assert shop.events[0].key == key_hash("key-1")


@on()
def test_another_request_under_the_same_key(shop: Shop) -> None:
    shop.serve()
    shop.post()
    other = shop.post(amount=7)
    assert (other.status_code, problem(other)) == (422, "key-reused")
    assert shop.post(headers={"Authorization": "acct_2"}).status_code == 201  # another account, another key
    assert shop.rows() == [5, 5]


@on("sqlite3", "flask-sqlalchemy")
def test_keys_that_are_none(shop: Shop) -> None:
    shop.serve()
    missing, invalid = shop.post(None), shop.post("x" * 300)
    assert (missing.status_code, problem(missing)) == (400, "key-missing")
    assert (invalid.status_code, problem(invalid)) == (400, "key-invalid")
    for joined_by_the_server in ("a,b", '"a","a"', "a, a"):
        assert problem(shop.post(joined_by_the_server)) == "key-invalid"
    assert shop.post('"key-1"').data == shop.post("key-1").data  # one key, two spellings
    assert shop.rows() == [5]


@on("sqlite3", "flask-sqlalchemy")
def test_nobody_reads_an_answer_without_login(shop: Shop) -> None:
    shop.serve()
    shop.post()
    stranger = shop.post(headers={})
    assert stranger.status_code == 401
    assert "Idempotent-Replayed" not in stranger.headers
    shop.once.account = lambda: None
    nobody = shop.post()
    assert (nobody.status_code, problem(nobody)) == (401, "account-missing")


@on("sqlite3", "flask-sqlalchemy")
def test_a_request_that_is_refused_before_the_claim_uses_up_no_key(shop: Shop) -> None:
    def parse() -> None:
        amount = request.get_json()["amount"]
        if amount < 0:
            abort(400)
        if amount > 100:
            raise NotSaved(Answer(422, (("Content-Type", "text/plain"),), b"too much"))

    shop.serve(parse=parse)
    assert shop.post(amount=-1).status_code == 400
    large = shop.post(amount=101)
    assert (large.status_code, large.data) == (422, b"too much")
    assert shop.saved() == []
    assert shop.post(amount=1).status_code == 201


@on("sqlite3")
def test_an_optional_key_and_other_methods(shop: Shop) -> None:
    shop.serve(required=False)

    @shop.app.route("/both", methods=["GET", "POST"])
    @shop.once.keyed()
    def both() -> str:
        return request.method

    assert [shop.post(None).status_code for _ in range(2)] == [201, 201]
    assert shop.rows() == [5, 5]
    assert shop.saved() == []
    assert shop.app.test_client().get("/both").data == b"GET"


# --- errors and refusals ------------------------------------------------------------------------------------


@on()
@pytest.mark.parametrize("status", [402, 409])
def test_a_raised_refusal_is_kept_and_its_work_undone(shop: Shop, status: int) -> None:
    def view() -> Any:
        shop.insert()
        if status == 402:
            raise TooMuch("5 is too much")
        abort(409)

    shop.serve(view)
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code) == (status, status)
    assert first.data == again.data != b""
    assert first.headers["Content-Length"] == again.headers["Content-Length"] == str(len(first.data))
    assert first.mimetype == again.mimetype
    assert (replayed(first), replayed(again)) == (False, True)
    assert (shop.rows(), shop.calls, shop.saved()) == ([], 1, [status])


@on()
def test_a_returned_refusal_is_kept_with_its_work(shop: Shop) -> None:
    def view() -> Any:
        shop.insert()
        return {"declined": True}, 402

    shop.serve(view)
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code, first.data) == (402, 402, again.data)
    assert (shop.rows(), shop.calls) == ([5], 1)


@on()
def test_an_unhandled_error_undoes_everything_and_the_key_is_free(shop: Shop) -> None:
    def view() -> Any:
        answer = shop.usual()
        if shop.calls == 1:
            raise RuntimeError("a bug")
        return answer

    shop.app.register_error_handler(500, lambda error: ("our own page", 500))
    shop.serve(view)
    failed = shop.post()
    assert (failed.status_code, failed.data) == (500, b"our own page")
    assert (shop.rows(), shop.saved()) == ([], [])
    assert shop.outcomes() == [Outcome.NEW, Outcome.RELEASED]
    assert shop.post().status_code == 201
    assert shop.rows() == [5]


@on()
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_is_not_saved_is_undone(shop: Shop, status: int) -> None:
    def view() -> Any:
        answer = shop.usual()
        return answer if shop.calls > 1 else ("not now", status)

    shop.serve(view)
    assert shop.post().status_code == status
    assert (shop.rows(), shop.saved()) == ([], [])
    assert shop.post().status_code == 201


@on()
@pytest.mark.parametrize("answer", [({"wait": 1}, 409), Answer(409, (), b"wait")])
def test_not_saved(shop: Shop, answer: Any) -> None:
    def view() -> Any:
        shop.insert()
        raise NotSaved(answer)

    shop.serve(view)
    assert [shop.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.calls, shop.rows(), shop.saved()) == (2, [], [])


@on()
def test_a_commit_that_fails_is_a_500(shop: Shop) -> None:
    shop.serve(lambda: {"id": shop.insert(parent=999)})  # a deferred foreign key
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert (shop.rows(), shop.saved(), shop.calls) == ([], [], 2)


@on("sqlite3")
def test_everything_is_saved_once_the_view_began_where_that_is_the_policy(shop: Shop) -> None:
    def view() -> Any:
        shop.insert()
        raise RuntimeError("a bug")

    shop.serve(view, save="all-after-start")
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code, first.data) == (500, 500, again.data)
    assert (shop.rows(), shop.calls, shop.saved()) == ([], 1, [500])


@on("sqlite3", "flask-sqlalchemy")
def test_a_view_that_fails_while_it_is_rendered(shop: Shop) -> None:
    def view() -> Any:
        shop.insert()  # and returns nothing

    shop.serve(view)
    assert shop.post().status_code == 500
    assert (shop.rows(), shop.saved()) == ([], [])


# --- the view and the transaction ---------------------------------------------------------------------------


@on(*SESSIONS)
def test_the_views_commit_comes_with_the_answer(shop: Shop) -> None:
    def view() -> Any:
        with shop.session() as session:
            session.add(Charge(amount=5))
            session.commit()
            if shop.calls == 1:
                raise RuntimeError("a bug")
            if shop.calls == 2:
                session.add(Charge(amount=6))
                session.rollback()
        return "", 204

    shop.serve(view)
    assert shop.post().status_code == 500
    assert (shop.rows(), shop.saved()) == ([], [])
    assert shop.post().status_code == 204
    assert (shop.rows(), shop.saved()) == ([5], [204])
    again = shop.post()
    assert (again.status_code, replayed(again), "Content-Length" in again.headers) == (204, True, False)


@on(*SESSIONS)
def test_what_is_only_added_is_kept(shop: Shop) -> None:
    def view() -> Any:
        with shop.session() as session:
            session.add(Charge(amount=5))
        return "done"

    shop.serve(view)
    assert shop.post().data == shop.post().data == b"done"
    assert shop.rows() == [5]


@on(*SESSIONS)
def test_an_unflushed_duplicate_reaches_the_error_handler(shop: Shop) -> None:
    shop.app.register_error_handler(IntegrityError, lambda error: ("duplicate", 409))

    def view() -> Any:
        with shop.session() as session:
            session.add(Charge(amount=5, note="same"))
        return "done"

    shop.serve(view)
    assert shop.post("key-1").data == b"done"
    assert [shop.post("key-2").data for _ in range(2)] == [b"duplicate", b"duplicate"]
    assert (shop.rows(), shop.saved(), shop.calls) == ([5], [200, 409], 2)


@on()
def test_a_swallowed_error(shop: Shop) -> None:
    def view() -> Any:
        shop.insert(note="same")
        try:
            shop.insert(note="same")
        except (IntegrityError, sqlite3.IntegrityError, psycopg.IntegrityError):
            if shop.kind in SESSIONS:
                with shop.session() as session:
                    session.rollback()
        return "done"

    shop.serve(view)
    expected = {"sqlite3": (200, [5]), "psycopg": (500, [])}.get(shop.kind, (200, []))
    assert (shop.post().status_code, shop.rows()) == expected
    assert shop.saved() == ([200] if expected[0] == 200 else [])


@on()
def test_a_view_that_ends_the_transaction_blocks_nobody(shop: Shop) -> None:
    def view() -> Any:
        shop.insert()
        shop.execute("COMMIT")
        return "done"

    shop.serve(view)
    assert shop.post().status_code == 200
    again = shop.post()
    assert (again.data, replayed(again)) == (b"done", True)
    assert (shop.rows(), shop.calls) == ([5], 1)
    assert Outcome.TORN in shop.outcomes()


@on(*FLASK_SQLALCHEMY)
def test_a_login_that_reads_through_the_views_session(shop: Shop) -> None:
    """The session has a transaction of its own by the time of the claim; it is ended, its objects stay."""
    shop.app.after_request(lambda response: response if g.user.amount == 1 else abort(500))
    with shop.app.app_context():
        shop.db.session.add(Charge(amount=1, note="a user"))
        shop.db.session.commit()

    @shop.app.post("/charges")
    @shop.once.keyed()
    def charge() -> Any:
        shop.db.session.add(Charge(amount=5 * g.user.amount))
        shop.db.session.commit()
        if request.get_json()["amount"] == 6:
            abort(409)
        return {"user": g.user.note}

    @shop.app.before_request
    def login() -> None:
        g.user = shop.db.session.execute(sqlalchemy.select(Charge).filter_by(note="a user")).scalar_one()
        g.account = g.user.note

    for amount, status in ((5, 200), (6, 409)):
        answers = [shop.post(f"key-{amount}", amount=amount) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status] * 2
        assert replayed(answers[1])
    assert shop.rows() == [1, 5]
    assert Outcome.STRAY not in shop.outcomes()


@on("sessions")
def test_the_applications_own_scoped_session(shop: Shop) -> None:
    """The pattern of SQLAlchemy without an extension, from before Flask-SQLAlchemy."""
    own = sqlalchemy.orm.scoped_session(joined(shop.origin))
    shop.app.teardown_appcontext(lambda error: own.remove())

    @shop.app.post("/charges")
    @shop.once.keyed()
    def charge() -> Any:
        own.add(Charge(amount=5))
        own.commit()
        with outside(), shop.origin() as audit:
            audit.add(Charge(amount=99))
            audit.commit()
        abort(409)

    @shop.app.before_request
    def login() -> None:
        g.account = str(own.execute(text("SELECT 1")).scalar_one())

    assert [shop.post().status_code for _ in range(2)] == [409, 409]
    assert shop.rows() == [99]


@on("flask-sqlalchemy")
def test_a_session_that_does_not_join_is_told_of(shop: Shop) -> None:
    other = Flask("other")
    other.config.update(shop.app.config)
    db = SQLAlchemy(other)
    shop.app = other
    shop.once = Idempotency(lambda: db.engine, account=lambda: g.account, listeners=[shop.events.append])

    def view() -> Any:
        db.session.add(Charge(amount=5))
        db.session.commit()
        return "done"

    shop.serve(view)
    assert shop.post().status_code == 200
    assert Outcome.STRAY in shop.outcomes()
    with other.app_context():
        db.engine.dispose()


# --- bodies -------------------------------------------------------------------------------------------------


@on()
def test_a_stream_is_sent_after_the_commit_and_remembered_without_its_body(shop: Shop) -> None:
    seen: list[Any] = []

    def view() -> Any:
        shop.insert()

        def parts() -> Iterator[str]:
            seen.append((shop.rows(), shop.saved(), shop.borrowed()))
            yield "one "
            yield "two"

        return Response(parts(), mimetype="text/plain")

    shop.serve(view)
    first, again = shop.post(), shop.post()
    assert first.data == b"one two"
    assert seen == [([5], [200], 0)]
    assert (again.data, again.headers["Idempotent-Body"], replayed(again)) == (b"", "omitted", True)
    assert "Content-Type" not in again.headers


@on("sqlite3")
def test_a_captured_stream(shop: Shop) -> None:
    closed: list[bool] = []

    def view() -> Any:
        def parts() -> Iterator[str]:
            try:
                yield "one "
                yield "x" * request.get_json()["amount"]
                yield "end"
            finally:
                closed.append(True)

        return Response(parts())

    shop.serve(view, streams="capture", save_max_body=20)
    assert shop.post().data == shop.post().data == b"one xxxxxend"
    long, again = shop.post("key-2", amount=50), shop.post("key-2", amount=50)
    assert (long.data, again.data) == (b"one " + b"x" * 50 + b"end", b"")
    long.close()
    assert closed == [True, True]


@on("sqlite3", "flask-sqlalchemy")
def test_an_answer_that_breaks_before_it_is_whole(shop: Shop) -> None:
    def view() -> Any:
        shop.insert()

        def parts() -> Iterator[str]:
            yield "one "
            raise RuntimeError("a bug")

        return Response(parts(), headers={"Content-Length": "7"})

    shop.serve(view)
    assert shop.post().status_code == 500
    assert (shop.rows(), shop.saved()) == ([], [])


@on("sqlite3")
def test_another_attempt_that_came_between_has_the_answer(shop: Shop) -> None:
    """The view ends the transaction, and with it the lock; while it goes on a duplicate is served."""
    closed: list[bool] = []
    another_process = Shop("sqlite3", shop.place).serve()

    def view() -> Any:
        shop.execute("COMMIT")
        assert another_process.post().status_code == 201
        response = Response(iter(["too ", "late"]), headers={"Content-Length": "8"})
        response.call_on_close(lambda: closed.append(True))
        return response

    shop.serve(view)
    first = shop.post()
    assert (first.status_code, replayed(first)) == (201, True)
    assert shop.post().data == first.data
    assert closed == [True]


@on("sqlite3")
def test_an_answer_larger_than_can_be_kept(shop: Shop) -> None:
    shop.serve(lambda: "x" * 100, save_max_body=99)
    shop.serve(lambda: "x" * 99, save_max_body=99, path="/smaller")
    assert [shop.post().data for _ in range(2)] == [b"x" * 100, b""]
    assert [shop.post("key-2", "/smaller").data for _ in range(2)] == [b"x" * 99] * 2


@on("sqlite3")
def test_a_file(shop: Shop, tmp_path: pathlib.Path) -> None:
    (tmp_path / "receipt.pdf").write_bytes(bytes(range(256)) * 10)
    shop.serve(lambda: send_file(tmp_path / "receipt.pdf"))
    first, again = shop.post(), shop.post()
    assert first.data == again.data == bytes(range(256)) * 10
    assert first.mimetype == again.mimetype == "application/pdf"
    first.close()


@on("sqlite3")
def test_headers_that_are_kept(shop: Shop) -> None:
    def view() -> Any:
        response = jsonify(id=1)
        response.headers.add("Link", "</a>; rel=next")
        response.headers.add("Link", "</b>; rel=prev")
        response.set_cookie("session", "secret")
        return response

    shop.serve(view)
    first, again = shop.post(), shop.post()
    assert (
        again.headers.getlist("Link") == first.headers.getlist("Link") == ["</a>; rel=next", "</b>; rel=prev"]
    )
    assert "Set-Cookie" in first.headers
    assert "Set-Cookie" not in again.headers


def form(content: bytes) -> dict[str, Any]:
    return {"data": {"note": "n", "file": (io.BytesIO(content), "a.txt")}}


@on("sqlite3")
def test_an_uploaded_file_counts(shop: Shop) -> None:
    def view() -> Any:
        return f"{request.form['note']} {request.files['file'].read().decode()}"

    shop.serve(view)
    first, again, other = shop.post(**form(b"one")), shop.post(**form(b"one")), shop.post(**form(b"two"))
    assert first.data == again.data == b"n one"
    assert problem(other) == "key-reused"


@on("sqlite3")
@pytest.mark.parametrize("kept", [True, False])
def test_a_form_that_was_read_before_the_view(shop: Shop, kept: bool) -> None:
    """As a check against forged requests does. Without the bytes any other file would pass for the same."""
    if kept:
        shop.app.before_request(lambda: None if request.get_data() else "nothing")
    shop.app.before_request(lambda: None if request.form["note"] == "n" else ("forged", 403))
    shop.serve(lambda: request.files["file"].read())
    statuses = [shop.post(**form(content)).status_code for content in (b"one", b"one", b"two")]
    assert statuses == ([200, 200, 422] if kept else [500, 500, 500])


@on("sqlite3")
def test_a_body_that_was_read_before_the_view_is_there_for_both(shop: Shop) -> None:
    shop.app.before_request(lambda: (request.get_json()["amount"] == 0 and "nothing") or None)
    shop.serve(lambda: {"amount": request.get_json()["amount"], "id": shop.insert()})
    assert shop.post().data == shop.post().data
    assert problem(shop.post(amount=6)) == "key-reused"


@on("sqlite3")
def test_the_raw_stream_can_still_be_read(shop: Shop) -> None:
    shop.serve(lambda: request.stream.read())
    assert shop.post(data=b"raw").data == shop.post(data=b"raw").data == b"raw"


@on("sqlite3")
def test_a_body_above_the_limit(shop: Shop) -> None:
    shop.serve(request_max_body=10)
    shop.serve(path="/flasks-own")
    shop.app.config["MAX_CONTENT_LENGTH"] = 20
    assert problem(shop.post(data=b"x" * 11)) == "request-too-large"
    assert shop.post(data=b"x" * 10).status_code == 201
    assert shop.post("key-2", "/flasks-own", data=b"x" * 21).status_code == 413
    assert shop.post("key-2", "/flasks-own", data=b"x" * 20).status_code == 201
    cut_off = shop.post("key-3", data=b"x" * 5, environ_overrides={"CONTENT_LENGTH": "9"})
    assert problem(cut_off) == "request-incomplete"


# --- shapes of applications ---------------------------------------------------------------------------------


@on("sqlite3", "flask-sqlalchemy")
def test_a_blueprint_with_an_error_handler_and_a_class_based_view(shop: Shop) -> None:
    blueprint = Blueprint("payments", __name__, url_prefix="/v1")
    blueprint.register_error_handler(ValueError, lambda error: ("of the blueprint", 422))

    class Charges(MethodView):
        init_every_request = False

        @shop.once.keyed()
        def post(self, amount: int) -> Any:
            shop.insert(amount)
            if amount == 6:
                raise ValueError
            return f"charged {amount}"

    class Decorated(MethodView):
        decorators = [shop.once.keyed(scope="route"), login_required]  # noqa: RUF012  (Flask's own way)

        def get(self) -> str:
            return "free"

        def post(self) -> Any:
            return str(shop.insert())

    blueprint.add_url_rule("/charges/<int:amount>", view_func=login_required(Charges.as_view("charges")))
    blueprint.add_url_rule("/decorated", view_func=Decorated.as_view("decorated"))
    shop.app.register_blueprint(blueprint)
    for amount, body in ((5, b"charged 5"), (6, b"of the blueprint")):
        answers = [shop.post(f"key-{amount}", f"/v1/charges/{amount}") for _ in range(2)]
        assert [answer.data for answer in answers] == [body, body]
        assert replayed(answers[1])
    assert problem(shop.post("key-5", "/v1/charges/7")) == "key-reused"
    assert shop.rows() == [5]
    assert shop.events[0].route == "POST /v1/charges/<int:amount>"
    assert shop.post("key-5", "/v1/decorated").data == shop.post("key-5", "/v1/decorated").data
    assert shop.rows() == [5, 5]
    free = shop.app.test_client().get("/v1/decorated", headers={"Authorization": "a"})
    assert free.data == b"free"


def test_first_requests_of_two_applications_at_once(tmp_path: pathlib.Path) -> None:
    """Each claims in its own database, whichever way their threads cut in on each other."""
    engines = {name: create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in "ab"}
    apps = [Flask(name) for name in engines]
    between = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        for _ in range(500):
            once = Idempotency(lambda: engines[current_app.name], account=lambda: "acct_1")
            found: dict[str, Any] = {}

            def first(app: Flask, once: Idempotency = once, found: dict[str, Any] = found) -> None:
                with app.app_context():
                    found[app.name] = getattr(once.source, "engine", None)

            threads = [threading.Thread(target=first, args=(app,)) for app in apps]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == engines
            for app in apps:
                app.extensions.clear()
    finally:
        sys.setswitchinterval(between)


def test_an_application_factory(tmp_path: pathlib.Path, charges_sqlite: str) -> None:
    """One `db` and one `once` for the module, several applications: each with a database of its own."""
    db = SQLAlchemy(session_options=joined_options())
    once = Idempotency(lambda: db.engine, account=lambda: "acct_1")
    second = tmp_path / "second.db"
    with (
        contextlib.closing(sqlite3.connect(charges_sqlite)) as made,
        contextlib.closing(sqlite3.connect(second)) as copy,
    ):
        made.backup(copy)

    def create_app(place: str) -> Flask:
        app = Flask("factory")
        app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{place}"
        db.init_app(app)

        @app.post("/charges")
        @once.keyed()
        def charge() -> Any:
            row = Charge(amount=5)
            db.session.add(row)
            db.session.commit()
            abort(409)

        return app

    for place in (charges_sqlite, str(second)):
        app = create_app(place)
        answers = [
            app.test_client().post("/charges", headers={"Idempotency-Key": "key-1"}, json={})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [409, 409]
        assert [replayed(answer) for answer in answers] == [False, True]
        with contextlib.closing(sqlite3.connect(place)) as connection:
            assert connection.execute("SELECT count(*) FROM charges").fetchone() == (0,)
        with app.app_context():
            db.engine.dispose()


@on("sqlite3")
def test_views_that_cannot_be_kept_are_refused_where_they_are_written(shop: Shop) -> None:
    async def awaiting() -> str:
        return ""

    def generator() -> Iterator[str]:
        yield ""

    class Charges(MethodView):
        async def post(self) -> str:
            return ""

    for view in (awaiting, generator, Charges.as_view("charges")):
        with pytest.raises(Misuse):
            shop.once.keyed()(view)
    with pytest.raises(Misuse, match="no setting"):
        shop.once.keyed(windw="24h")


@on("sqlite3")
def test_keyed_twice_and_connections_outside_are_refused(shop: Shop) -> None:
    shop.app.config["PROPAGATE_EXCEPTIONS"] = True
    shop.serve(shop.once.keyed()(shop.usual))
    shop.serve(lambda: shop.once.session().__enter__(), path="/session")
    shop.app.get("/outside")(shop.once.connection)
    with pytest.raises(Misuse, match="keyed twice"):
        shop.post()
    with pytest.raises(Misuse, match="not keyed"):
        shop.app.test_client().get("/outside")
    with pytest.raises(Misuse, match="session maker"):
        shop.post("key-2", "/session")


def test_an_origin_that_awaits_is_refused() -> None:
    app = Flask("async")
    once = Idempotency(lambda: create_async_engine("sqlite+aiosqlite://"), account=lambda: "acct_1")
    app.post("/")(once.keyed()(lambda: "done"))
    app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(Misuse, match="block"):
        app.test_client().post("/", headers={"Idempotency-Key": "key-1"})


@on("sessions")
def test_a_session_outside_a_keyed_view_is_a_plain_one(shop: Shop) -> None:
    @shop.app.post("/plain")
    def plain() -> Any:
        with shop.once.session() as session:
            session.add(Charge(amount=7))
            session.commit()
        return "done"

    assert shop.post(path="/plain").data == b"done"
    assert shop.rows() == [7]


@on("sqlite3")
def test_lines_of_the_log_bear_the_keys_hash(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(KeyHashFilter())

    def view() -> Any:
        logging.getLogger("shop").warning("charging")
        return "done"

    shop.serve(view)
    with caplog.at_level(logging.INFO):
        shop.post()
        logging.getLogger("shop").warning("after")
    hashes = {record.getMessage(): getattr(record, "idempotency_key_hash", None) for record in caplog.records}
    assert hashes["charging"] == key_hash("key-1")
    assert hashes["after"] is None
    assert "key-1" not in caplog.text


# --- duplicates in one process ------------------------------------------------------------------------------


class Door:
    """A view comes to it and waits; the test knows that it is there, and opens."""

    def __init__(self) -> None:
        self.there = threading.Semaphore(0)
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.there.release()
        assert self.opened.wait(20)


@on("sqlite3", "psycopg", "flask-sqlalchemy")
def test_at_most_half_of_the_threads_wait(shop: Shop) -> None:
    door = Door()
    shop.once = shop.idempotency(threads=4)

    def view() -> Any:
        door.pass_through()
        return shop.usual()

    shop.serve(view, wait="20s")
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(shop.post)
        assert door.there.acquire(timeout=20)
        waiters = [pool.submit(shop.post) for _ in range(2)]
        until(lambda: shop.once.gate._waiting == 2)
        assert shop.borrowed() == 1  # they wait without a connection
        beyond = shop.post()
        assert (beyond.status_code, problem(beyond)) == (409, "in-progress")
        assert beyond.headers["Retry-After"] == "1"
        door.opened.set()
        answers = [first.result(), *(waiter.result() for waiter in waiters)]
    assert {answer.data for answer in answers} == {answers[0].data}
    assert sorted(map(replayed, answers)) == [False, True, True]
    assert (shop.rows(), shop.calls) == ([5], 1)


@on("psycopg", "flask-sqlalchemy")
def test_waiting_for_another_process_counts_as_well(shop: Shop) -> None:
    """Two gates, as two processes have. The second has two threads, of which one may wait, for any key."""
    door = Door()

    def view() -> Any:
        door.pass_through()
        return shop.usual()

    shop.serve(view, wait="20s")
    shop.once = shop.idempotency(threads=2)
    shop.serve(path="/other-process", wait="20s")
    with ThreadPoolExecutor(3) as pool:
        holders = [pool.submit(shop.post, key) for key in ("key-1", "key-2")]
        for _ in holders:
            assert door.there.acquire(timeout=20)
        waiter = pool.submit(shop.post, "key-1", "/other-process")
        until(lambda: shop.once.gate._waiting == 1)
        assert problem(shop.post("key-2", "/other-process")) == "in-progress"
        door.opened.set()
        assert [holder.result().status_code for holder in holders] == [201, 201]
        assert problem(waiter.result()) == "key-reused"  # for it was another path
    assert shop.rows() == [5, 5]


# --- gunicorn -----------------------------------------------------------------------------------------------

WORK = 0.02
"""Seconds that the work of the served application takes: long enough for a race without a key to be lost."""


def served() -> Flask:
    """The application that gunicorn serves, in each of its workers."""
    shop = Shop(os.environ["SHOP_KIND"], os.environ["SHOP_PLACE"], pool_size=4)
    shop.once = shop.idempotency(threads=4)

    def usual() -> Any:
        time.sleep(WORK)
        return shop.usual()

    def at_the_door() -> Any:
        with open(os.environ["SHOP_DOOR"]) as door:  # opens when the test opens it too
            door.read()  # until the test closes it
        return shop.usual()

    shop.serve(usual)
    shop.serve(at_the_door, path="/door")

    @shop.app.post("/control")
    def control() -> Any:
        """What is written without a library: look, work, insert."""
        if not shop.query("SELECT count(*) FROM charges")[0]:
            time.sleep(WORK)
            with contextlib.closing(psycopg.connect(shop.place)) as connection, connection:
                connection.execute("INSERT INTO charges (amount) VALUES (5)")
        return "done"

    return shop.app


class Served:
    """The application under gunicorn: two processes of four threads."""

    def __init__(self, kind: str, place: str, door: pathlib.Path) -> None:
        self.truth = Shop(kind, place)
        self.door = door
        os.mkfifo(door)
        self._running = contextlib.ExitStack()
        environment: Any = {"SHOP_KIND": kind, "SHOP_PLACE": place, "SHOP_DOOR": str(door)}
        self.address = self._running.enter_context(gunicorn("tests.http.test_flask:served()", **environment))
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}", limits=limits, timeout=30
        )

    def close(self) -> None:
        self._client.close()
        self._running.close()
        self.truth.close()

    def post(self, key: str, path: str = "/charges") -> httpx2.Response:
        headers = {"Authorization": "acct_1", "Idempotency-Key": key}
        return self._client.post(path, headers=headers, json={"amount": 5})

    def post_until_answered(self, key: str, path: str = "/charges") -> tuple[httpx2.Response, int]:
        """As a client does: again while the first attempt is in progress. Also how often it was."""
        for refusals in range(10_000):
            answer = self.post(key, path)
            if answer.status_code != 409:
                return answer, refusals
            assert problem(answer) == "in-progress"
            assert answer.headers["retry-after"] == "1"
        raise AssertionError("never answered")

    def raw(self, path: str, body: bytes, length: int) -> socket.socket:
        """A connection on which a request was begun."""
        connection = socket.create_connection(self.address)
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: shop",
            "Content-Type: application/json",
            "Authorization: acct_1",
            "Idempotency-Key: key-1",
            f"Content-Length: {length}",
            "\r\n",
        )
        connection.sendall("\r\n".join(lines).encode() + body)
        return connection


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Served]:
    kind = request.param
    place = request.getfixturevalue("charges_sqlite" if kind in SQLITE else "charges_postgres")
    made = Served(kind, place, tmp_path / "door")
    try:
        yield made
    finally:
        made.close()


def under_gunicorn(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", kinds, indirect=True)


@under_gunicorn("sqlite3", "psycopg", "flask-sqlalchemy")
def test_duplicates_at_once_have_one_effect(server: Served) -> None:
    for key, number in (("key-5", 5), ("key-100", 100)):
        with ThreadPoolExecutor(number) as pool:
            answers = list(pool.map(server.post_until_answered, [key] * number))
        assert {answer.status_code for answer, _ in answers} == {201}
        assert len({answer.content for answer, _ in answers}) == 1
        assert sum("idempotent-replayed" not in answer.headers for answer, _ in answers) == 1
    assert server.truth.rows() == [5, 5]


@under_gunicorn("psycopg")
def test_the_same_without_keys_has_several_effects(server: Served) -> None:
    """The race is real: the test above does not pass because nothing ever meets."""
    with ThreadPoolExecutor(100) as pool:
        assert {answer.status_code for answer in pool.map(server.post, ["-"] * 100, ["/control"] * 100)} == {
            200
        }
    assert len(server.truth.rows()) > 1


@under_gunicorn("sqlite3", "psycopg", "flask-sqlalchemy")
def test_a_client_that_hangs_up(server: Served) -> None:
    server.raw("/door", b'{"am', 12).close()  # while it sends: nothing was begun
    connection = server.raw("/door", b'{"amount":5}', 12)
    with server.door.open("w"):  # the view is at work now
        connection.close()
    answer, _ = server.post_until_answered("key-1", "/door")
    assert answer.status_code == 201
    assert answer.headers["idempotent-replayed"] == "true"
    assert server.truth.rows() == [5]
