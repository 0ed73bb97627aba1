"""The reference application on Flask: payments, transfers, wallets, and a handler that plays any answer.

    app, once = create_app(Stack.named("psycopg", url), Settings(), World())

A keyed view is decorated with ``@once.keyed()``; its work and its saved answer commit together.
"""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, abort, jsonify, redirect, request

from taptwice.conformance.apps.world import Unknown, Withdrawn, World
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import BlockingDatabase, Stack
from taptwice.faults import point
from taptwice.http.flask import Idempotency

logger = logging.getLogger("shop")

THREADS = 256
"""Threads of the server; half of them may wait for a first attempt."""


def document() -> dict[str, Any]:
    """The JSON object that was sent. Refuses everything else."""
    found = request.get_json()
    if not isinstance(found, dict):
        abort(422, "not an object")
    return found


def checked(amount_cents: Any, currency: Any) -> None:
    if type(amount_cents) is not int or amount_cents <= 0:
        abort(422, "amount_cents must be a whole number above 0")
    if not (isinstance(currency, str) and len(currency) == 3 and currency.isalpha() and currency.islower()):
        abort(422, "currency must be three lower-case letters")


def valid_payment() -> None:
    """Runs before the claim: what is refused here uses no key up."""
    asked = document()
    checked(asked.get("amount_cents"), asked.get("currency"))


def valid_form() -> None:
    checked(request.form.get("amount_cents", type=int), request.form.get("currency"))


def valid_upload() -> None:
    if "file" not in request.files:
        abort(422, "file is missing")


def etag(amount_cents: int) -> str:
    return f'"{amount_cents}"'


def answered(body: Any, status: int = 200, **headers: str) -> Response:
    response = jsonify(body)
    response.status_code = status
    response.headers.update(headers)
    return response


def create_app(stack: Stack, settings: Settings, world: World) -> tuple[Flask, Idempotency]:
    """The application, and the `once` of its keyed views."""
    app = Flask(__name__)

    def account() -> str | None:
        """Who is calling. Runs, and refuses, before a key is looked at."""
        authorization = request.headers.get("Authorization")
        if authorization is None and settings.auth == "optional":
            return None
        try:
            whose, user = world.login((authorization or "").removeprefix("Bearer "))
        except Unknown:
            abort(Response(status=401, headers={"WWW-Authenticate": "Bearer"}))
        except Withdrawn:
            abort(403)
        if settings.read_before_claim:
            with stack.lent_blocking() as db:
                db.execute("SELECT balance_cents FROM wallets")
        return settings.account_of(whose, user, request.headers.get)

    once = Idempotency(
        lambda: stack.origin,
        account=account,
        policy=settings.policy(),
        listeners=[world.count],
        clock=world.clock,
        threads=THREADS,
    )

    def shown(payment: str, amount_cents: int, currency: str) -> dict[str, Any]:
        body = {"id": payment, "amount_cents": amount_cents, "currency": currency}
        return {**body, "object": "payment"} if settings.payments_response == "v2" else body

    def pay(db: BlockingDatabase, amount_cents: int, currency: str, card: str | None = None) -> Response:
        point("in_handler")
        if card == "tok_declined" or (card == "tok_declined_once" and world.executed(card) == 1):
            return answered({"error": "card declined"}, 402)
        payment = f"pay_{uuid.uuid4().hex}"
        db.execute(
            "INSERT INTO payments (id, amount_cents, currency) VALUES (:id, :amount, :currency)",
            id=payment,
            amount=amount_cents,
            currency=currency,
        )
        point("after_effect")
        logger.info("payment accepted")
        body = shown(payment, amount_cents, currency)
        return answered(body, 201, Location=f"/payments/{payment}", ETag=etag(amount_cents))

    def found(db: BlockingDatabase, payment: str, table: str = "payments") -> tuple[int, str]:
        rows = db.execute(
            f"SELECT amount_cents, currency FROM {table} WHERE id = :id",  # noqa: S608  # ours, not the caller's
            id=payment,
        )
        if not rows:
            abort(404)
        return rows[0][0], rows[0][1]

    def create_payment(db: BlockingDatabase) -> Response:
        asked = document()
        time.sleep(asked.get("sleep_ms", 0) / 1000)
        return pay(db, asked["amount_cents"], asked["currency"], asked.get("card"))

    def form_payment(db: BlockingDatabase) -> Response:
        return pay(db, int(request.form["amount_cents"]), request.form["currency"])

    def read_payment(db: BlockingDatabase, payment: str) -> Response:
        amount_cents, currency = found(db, payment, settings.read_from)
        return answered(shown(payment, amount_cents, currency), ETag=etag(amount_cents))

    def change_payment(db: BlockingDatabase, payment: str) -> Response:
        point("in_handler")
        before, currency = found(db, payment)
        if request.headers.get("If-Match", etag(before)) != etag(before):
            abort(412)
        after = before + document()["add_cents"]
        db.execute("UPDATE payments SET amount_cents = :after WHERE id = :id", after=after, id=payment)
        point("after_effect")
        return answered(shown(payment, after, currency), ETag=etag(after))

    def delete_payment(db: BlockingDatabase, payment: str) -> Response:
        _ = found(db, payment)
        db.execute("DELETE FROM payments WHERE id = :id", id=payment)
        return Response(status=204)

    def transfer(db: BlockingDatabase) -> Response:
        point("in_handler")
        asked = document()
        name = f"tr_{uuid.uuid4().hex}"
        db.execute(
            "INSERT INTO transfers (id, source, target, amount_cents) "
            "VALUES (:id, :source, :target, :amount)",
            id=name,
            source=asked["from"],
            target=asked["to"],
            amount=asked["amount_cents"],
        )
        for wallet, amount in ((asked["from"], -asked["amount_cents"]), (asked["to"], asked["amount_cents"])):
            db.execute(
                "INSERT INTO ledger (transfer, wallet, amount_cents) VALUES (:transfer, :wallet, :amount)",
                transfer=name,
                wallet=wallet,
                amount=amount,
            )
            db.execute(
                "UPDATE wallets SET balance_cents = balance_cents + :amount WHERE id = :id",
                amount=amount,
                id=wallet,
            )
            if wallet == asked["from"]:
                point("between_effects")
        point("after_effect")
        return answered({"id": name, "amount_cents": asked["amount_cents"]}, 201)

    def put_wallet(db: BlockingDatabase, wallet: str) -> Response:
        cents = document()["balance_cents"]
        db.execute(
            "INSERT INTO wallets (id, balance_cents) VALUES (:id, :cents) "
            "ON CONFLICT (id) DO UPDATE SET balance_cents = excluded.balance_cents",
            id=wallet,
            cents=cents,
        )
        return answered({"id": wallet, "balance_cents": cents})

    def unkeyed(db: BlockingDatabase) -> Response:
        db.execute("INSERT INTO unkeyed (id) VALUES (:id)", id=uuid.uuid4().hex)
        return answered({}, 201)

    def upload(db: BlockingDatabase) -> Response:
        point("in_handler")
        name = f"up_{uuid.uuid4().hex}"
        file = request.files["file"]
        db.execute(
            "INSERT INTO uploads (id, note, filename, size) VALUES (:id, :note, :filename, :size)",
            id=name,
            note=request.form.get("note", ""),
            filename=file.filename or "",
            size=len(file.read()),
        )
        point("after_effect")
        return answered({"id": name}, 201)

    def play(db: BlockingDatabase) -> Response:
        point("in_handler")
        script = world.script(request.get_data(), request.headers.get(settings.names[0]))
        script.fails_before()
        for number in range(script.effects):
            if number:
                point("between_effects")
            db.execute("INSERT INTO effects (id) VALUES (:id)", id=uuid.uuid4().hex)
        point("after_effect")
        script.fails_after()
        if script.refuses:
            abort(script.refuses)
        response = Response(script.body if script.chunks is None else script.chunks, script.status)
        if any(name.lower() == "content-type" for name, _ in script.headers):
            del response.headers["Content-Type"]
        for name, value in script.headers:
            response.headers.add(name, value)
        return response

    def metrics() -> Response:
        return Response(world.metrics(), mimetype="text/plain")

    def to_payments() -> Any:
        return redirect("/payments", 307)

    def allow_the_shop(response: Response) -> Response:
        shown = ("Location", "ETag", "Retry-After", settings.replay_header)
        response.headers["Access-Control-Allow-Origin"] = "https://shop.example"
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, PUT, PATCH, DELETE"
        response.headers["Access-Control-Allow-Headers"] = ", ".join((*settings.names, "content-type"))
        response.headers["Access-Control-Expose-Headers"] = ", ".join(shown)
        return response

    def plain(path: str, view: Callable[..., Response], method: str) -> None:
        def outside(**named: str) -> Response:
            account()
            with stack.lent_blocking() as db:
                return view(db, **named)

        app.add_url_rule(path, f"{method} {path}", outside, methods=[method])

    def keyed(path: str, view: Callable[..., Response], method: str = "POST", parse: Any = None) -> None:
        if method not in settings.methods:
            plain(path, view, method)
            return

        @once.keyed(parse=parse)
        def inside(**named: str) -> Response:
            return view(BlockingDatabase(once.connection()), **named)

        app.add_url_rule(path, f"{method} {path}", inside, methods=[method])

    for path in settings.payment_paths:
        keyed(path, create_payment, parse=valid_payment)
    app.add_url_rule("/payments/", "slash", to_payments, methods=["POST"])
    plain("/payments/<payment>", read_payment, "GET")
    keyed("/payments/<payment>", change_payment, "PATCH", parse=document)
    keyed("/payments/<payment>", change_payment, parse=document)
    keyed("/payments/<payment>", delete_payment, "DELETE")
    keyed("/transfers", transfer, parse=document)
    keyed("/wallets/<wallet>", put_wallet, "PUT")
    keyed("/script", play)
    keyed("/form", form_payment, parse=valid_form)
    keyed("/upload", upload, parse=valid_upload)
    plain("/unkeyed", unkeyed, "POST")
    app.add_url_rule("/metrics", "metrics", metrics)
    app.after_request(allow_the_shop)
    return app, once
