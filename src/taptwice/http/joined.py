"""SQLAlchemy sessions that work in the claim's transaction.

    Session = joined(async_sessionmaker(engine))
    db = SQLAlchemy(session_options=joined_options())       # Flask-SQLAlchemy

Inside a keyed handler such a session works on the connection of the claim: its commit releases a savepoint,
its rollback goes back to one, and the real commit comes with the answer. Everywhere else it is the session
it was. What a session did before the claim (a login that reads) is committed when the claim begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from taptwice.errors import Misuse
from taptwice.flows.current import before_claims, current

Maker = TypeVar("Maker", bound="sessionmaker[Any] | async_sessionmaker[Any]")

_classes: dict[type[Session], type[Session]] = {}
_watched: WeakSet[Engine] = WeakSet()
instead: dict[Engine | Connection, Connection] = {}
"""Connections that take the place of an engine, in tests: see `taptwice.testing.bound_to`."""


def _open_executor(engine: object) -> Any:
    """The blocking executor of the open claim in this context, if it works on this engine."""
    under_way = current.get()
    executor = None if under_way is None else under_way.executor
    executor = getattr(executor, "blocking", executor)
    if executor is None or getattr(executor, "connection", None) is None:
        return None
    return executor if executor.connection.engine is engine else None


def _tell(session: Session) -> None:
    for told in before_claims:
        told(session)


def joining(base: type[Session]) -> type[Session]:
    """The class of sessions that join; one for each base."""
    if base not in _classes:

        class Joined(base):  # type: ignore[valid-type, misc]  # a class made from the user's own
            claimed_by: Any = None
            """The executor of the claim that it works in."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                under_way = current.get()
                if under_way is None or not under_way.joinable:
                    _tell(self)
                elif not self.join_claim():
                    under_way.made.append(self)

            def join_claim(self) -> bool:
                """Belong to the open claim from now on: what is only add()ed is flushed and kept with it."""
                executor = _open_executor(self._usual_bind())
                if executor is not None:
                    executor.adopt(self)
                return executor is not None

            def _usual_bind(self) -> Any:
                try:
                    return super().get_bind()
                except UnboundExecutionError:  # every class has a bind of its own
                    return None

            def get_bind(self, *arguments: Any, **options: Any) -> Engine | Connection:
                own: Engine | Connection = super().get_bind(*arguments, **options)
                executor = _open_executor(own)
                if executor is not None:
                    executor.adopt(self)
                    connection: Connection = executor.connection
                    return connection
                under_way = current.get()
                if under_way is None or not under_way.joinable:
                    _tell(self)
                elif self not in under_way.earlier:
                    under_way.earlier.append(self)
                return instead.get(own, own)

            def close(self) -> None:
                under_way = current.get()
                if under_way is not None and under_way.returned and self.join_claim():
                    return  # between the handler's return and the answer: settled and closed with the claim
                super().close()

        @event.listens_for(Joined, "after_commit")  # once a class: a listener for each session costs more
        def _committed(session: Any) -> None:
            if session.claimed_by is not None:
                session.claimed_by.note_commit(session)

        _classes[base] = Joined
    return _classes[base]


def left_to_claim(session: Any) -> bool:
    """Whether a session, whose block ends well, is settled and closed with the open claim.

    Closed here, it would take back what it did while the claim goes on to save an answer; committed here,
    what it did would outlast an exception that the handler raises afterwards.
    """
    joining: Any = getattr(session, "sync_session", session)
    return bool(joining.join_claim())


def joined(maker: Maker) -> Maker:
    """The same maker, of sessions that join the claim's transaction."""
    if maker.kw.get("binds"):
        raise Misuse(
            "this session maker has binds=: its classes may go to a database outside the claim's transaction"
        )
    settings = {**maker.kw, "join_transaction_mode": "create_savepoint"}
    if isinstance(maker, async_sessionmaker):
        base = settings.pop("sync_session_class", None) or maker.class_.sync_session_class
        return type(maker)(class_=maker.class_, sync_session_class=joining(base), **settings)
    return type(maker)(class_=joining(maker.class_), **settings)


def joined_options(**options: Any) -> dict[str, Any]:
    """Session options of Flask-SQLAlchemy for sessions that join the claim's transaction.

    SQLAlchemy(app, session_options=joined_options())
    """
    from flask_sqlalchemy.session import Session as FlaskSession

    base = options.pop("class_", FlaskSession)
    return {**options, "class_": joining(base), "join_transaction_mode": "create_savepoint"}


def watch(engine: Engine | AsyncEngine) -> None:
    """Notice transactions that begin on this engine inside a keyed handler, but outside its claim."""
    engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    if engine in _watched:
        return
    _watched.add(engine)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        executor = _open_executor(engine)
        under_way = current.get()
        if executor is None or under_way is None or executor.connection is connection:
            return
        under_way.strays.append("a session outside the claim's transaction was used in the handler")


@contextmanager
def outside() -> Iterator[None]:
    """Work in this block is meant to stay outside the claim: audit rows that survive an undone request."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)
