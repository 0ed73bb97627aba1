"""Flask: views that are keyed.

    db = SQLAlchemy(app, session_options=joined_options())      # from taptwice.http.joined
    once = Idempotency(lambda: db.engine, account=lambda: g.user.account_id)

    @app.post("/charges")
    @login_required
    @once.keyed()       # the innermost decorator: after the login, before the view
    def charge(): ...

What the view raises becomes its answer here, by the application's error handlers, while its work can still be
undone. Functions of ``after_request`` run outside: on a first answer and on a replay alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar, cast

from flask import Response, current_app, g, has_request_context, request

from taptwice import drivers
from taptwice.core.model import Answer
from taptwice.core.policy import Policy, changed
from taptwice.drivers import Source
from taptwice.errors import Misuse
from taptwice.flows.current import before_claims
from taptwice.http import wsgi
from taptwice.http.edge import Reading
from taptwice.http.request import NotSaved, Request

__all__ = ["Idempotency", "NotSaved"]

View = TypeVar("View", bound=Callable[..., Any])

SESSIONS = "taptwice_sessions"


class Idempotency(wsgi.WsgiSettings):
    """Idempotency for Flask.

    `account` gives the account of the request under way, or None for nobody. A function as origin is called
    once for each application, at its first request. The other arguments are those of `WsgiSettings`.
    """

    def __init__(self, origin: Any, *, account: Callable[[], str | None], **settings: Any) -> None:
        super().__init__(origin, **settings)
        self.account = account

    @property
    def source(self) -> Source:
        """Where the connections of this application come from."""
        if self.bound is not None:
            return super().source
        known: dict[Any, Source] = current_app.extensions.setdefault("taptwice", {})
        if self not in known:
            # Nothing is kept in `self`: the first requests of two applications may come at once.
            known[self] = self.checked(drivers.source(self.origin))
        return known[self]

    def connection(self) -> Any:
        """The claim's connection, in a keyed view: of sqlite3, psycopg or SQLAlchemy."""
        return wsgi.conducted_in(request.environ).handle

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A session of the session maker: in a keyed view the claim's, whose commit comes with the answer."""
        if wsgi.ENVIRON_KEY in request.environ:
            handle = self.connection()
            if not hasattr(handle, "add"):
                raise Misuse("once.session() needs a session maker: Idempotency(sessionmaker(engine), …)")
            yield handle
            return
        maker = self.origin if hasattr(self.origin, "configure") else self.origin()
        with maker() as session:
            yield session

    def keyed(self, *, parse: Callable[[], Any] | None = None, **changes: Any) -> Callable[[View], View]:
        """Decorator of a keyed view. `parse` may refuse a request before the claim: it aborts, or raises
        `NotSaved`. Other settings are those of `Policy`.
        """
        policy = changed(self.policy, **changes)

        def decorate(view: View) -> View:
            for each in (view, *_methods(view)):
                wsgi.check_view(each)

            @functools.wraps(view)
            def keyed(*arguments: Any, **named: Any) -> Any:
                if request.method not in policy.methods:
                    return view(*arguments, **named)

                def work(conducted: wsgi.Conducted) -> Response:
                    try:
                        account = self.account()
                        if parse is not None:
                            parse()
                    except NotSaved as refused:
                        return _returned(refused.answer)
                    for known in (conducted.exchange.current.earlier, conducted.exchange.current.made):
                        known.extend(session for session in g.get(SESSIONS, ()) if session not in known)
                    answer = conducted.claim(account)
                    if answer is None:
                        return _respond(conducted, functools.partial(view, *arguments, **named))
                    return _returned(answer)

                asked = wsgi.request_of(request.environ, getattr(request.url_rule, "rule", None))
                read = functools.partial(_read, asked, policy)
                return self.serve(policy, asked, request.environ, read, work, _returned)

            return cast(View, keyed)

        return decorate


def _methods(view: Any) -> list[Any]:
    """Those of a class-based view."""
    names = getattr(view, "methods", None) or ()
    return [getattr(view.view_class, name.lower()) for name in names] if hasattr(view, "view_class") else []


def _read(asked: Request, policy: Policy) -> bytes:
    """The whole body, which the view can then read again."""
    limit = min(policy.request_max_body, request.max_content_length or policy.request_max_body)
    reading = Reading(asked.headers, limit)
    if "stream" not in vars(request):
        return wsgi.read_body(request.environ, reading)
    reading.feed(request.get_data())  # somebody before us has read it, and perhaps kept it
    if reading.missing == reading.length and (reading.length or request.form or request.files):
        raise Misuse(
            "the form was read before the keyed view, and its bytes are gone: call request.get_data() "
            "in front of that, which keeps them"
        )
    return reading.end()


def _respond(conducted: wsgi.Conducted, call: Callable[[], Any]) -> Response:
    """A claimed request through its view; nothing leaves before the commit."""
    exchange = conducted.exchange
    try:
        response = current_app.make_response(call())
        conducted.flush()
    except NotSaved as refused:
        exchange.not_saved = True
        response = _returned(refused.answer)
    except Exception as error:
        exchange.raised = True
        try:
            response = current_app.make_response(current_app.handle_user_exception(error))
        except Exception as unhandled:
            answer = conducted.failed(unhandled)
            if answer is None:
                raise
            return _returned(answer)
    start = wsgi.start_of(response.status_code, response.get_wsgi_headers(request.environ))
    chunks = response.iter_encoded()
    step = wsgi.hold(exchange.policy, start, chunks)
    instead = conducted.conclude(step.answer)
    if instead is not None:
        response.close()
        return _returned(instead)
    parts = [message["body"] for message in step.messages[1:]]
    if parts and not response.is_sequence:  # some of it has been read
        response.call_on_close(getattr(response.response, "close", lambda: None))
        response.response = parts if step.answer.body is not None else chain(parts, chunks)
        response.direct_passthrough = False
    return response


def _returned(answer: Any) -> Response:
    """What a view could have returned, or an answer of ours."""
    if not isinstance(answer, Answer):
        return current_app.make_response(answer)
    response = current_app.response_class(answer.body or b"", answer.status)
    response.headers.clear()
    response.headers.extend(answer.headers)
    return response


def _remember(session: Any) -> None:
    """Sessions of a login, which runs before there is a claim."""
    if has_request_context() and session not in g.setdefault(SESSIONS, []):
        g.get(SESSIONS).append(session)


before_claims.append(_remember)
