"""The reference application on Starlette: payments, transfers, wallets, and a handler that plays any answer.

    app, once = create_app(Stack.named("asyncpg", url), Settings(), World())

A keyed endpoint is decorated with ``@once.keyed()`` and its route has the edge as middleware; its work and
its saved answer commit together.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from taptwice.conformance.apps.world import Unknown, Withdrawn, World
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import Database, Stack
from taptwice.faults import apoint
from taptwice.http.starlette import Idempotency

logger = logging.getLogger("shop")

Handler = Callable[[Request, Database], Awaitable[Response]]


async def document(request: Request) -> dict[str, Any]:
    """The JSON object that was sent. Refuses everything else."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415)
    try:
        found = await request.json()
    except ValueError:
        raise HTTPException(400, "not JSON") from None
    if not isinstance(found, dict):
        raise HTTPException(422, "not an object")
    return found


def checked(amount_cents: Any, currency: Any) -> None:
    if type(amount_cents) is not int or amount_cents <= 0:
        raise HTTPException(422, "amount_cents must be a whole number above 0")
    if not (isinstance(currency, str) and len(currency) == 3 and currency.isalpha() and currency.islower()):
        raise HTTPException(422, "currency must be three lower-case letters")


async def valid_payment(request: Request) -> None:
    """Runs before the claim: what is refused here uses no key up."""
    asked = await document(request)
    checked(asked.get("amount_cents"), asked.get("currency"))


async def valid_form(request: Request) -> None:
    async with request.form() as form:
        amount = str(form.get("amount_cents", ""))
        checked(int(amount) if amount.isdecimal() else None, form.get("currency"))


async def valid_upload(request: Request) -> None:
    async with request.form() as form:
        if not hasattr(form.get("file"), "filename"):
            raise HTTPException(422, "file is missing")


def etag(amount_cents: int) -> str:
    return f'"{amount_cents}"'


def create_app(stack: Stack, settings: Settings, world: World) -> tuple[Starlette, Idempotency]:
    """The application, and the `once` of its keyed routes."""

    async def account(request: Request) -> str | None:
        """Who is calling. Runs, and refuses, before a key is looked at."""
        authorization = request.headers.get("authorization")
        if authorization is None and settings.auth == "optional":
            return None
        try:
            whose, user = world.login((authorization or "").removeprefix("Bearer "))
        except Unknown:
            raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"}) from None
        except Withdrawn:
            raise HTTPException(403) from None
        if settings.read_before_claim:
            await stack.reading("SELECT balance_cents FROM wallets")
        return settings.account_of(whose, user, request.headers.get)

    once = Idempotency(
        stack.origin, account=account, policy=settings.policy(), listeners=[world.count], clock=world.clock
    )

    def shown(payment: str, amount_cents: int, currency: str) -> dict[str, Any]:
        body = {"id": payment, "amount_cents": amount_cents, "currency": currency}
        return {**body, "object": "payment"} if settings.payments_response == "v2" else body

    async def pay(db: Database, amount_cents: int, currency: str, card: str | None = None) -> Response:
        await apoint("in_handler")
        if card == "tok_declined" or (card == "tok_declined_once" and world.executed(card) == 1):
            return JSONResponse({"error": "card declined"}, 402)
        payment = f"pay_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO payments (id, amount_cents, currency) VALUES (:id, :amount, :currency)",
            id=payment,
            amount=amount_cents,
            currency=currency,
        )
        await apoint("after_effect")
        logger.info("payment accepted")
        headers = {"Location": f"/payments/{payment}", "ETag": etag(amount_cents)}
        return JSONResponse(shown(payment, amount_cents, currency), 201, headers)

    async def found(db: Database, payment: str, table: str = "payments") -> tuple[int, str]:
        rows = await db.execute(
            f"SELECT amount_cents, currency FROM {table} WHERE id = :id",  # noqa: S608  # ours, not the caller's
            id=payment,
        )
        if not rows:
            raise HTTPException(404)
        return rows[0][0], rows[0][1]

    async def create_payment(request: Request, db: Database) -> Response:
        asked = await request.json()
        await stack.sleep(asked.get("sleep_ms", 0) / 1000)
        return await pay(db, asked["amount_cents"], asked["currency"], asked.get("card"))

    async def form_payment(request: Request, db: Database) -> Response:
        async with request.form() as form:
            return await pay(db, int(str(form["amount_cents"])), str(form["currency"]))

    async def read_payment(request: Request, db: Database) -> Response:
        payment = request.path_params["payment"]
        amount_cents, currency = await found(db, payment, settings.read_from)
        return JSONResponse(shown(payment, amount_cents, currency), headers={"ETag": etag(amount_cents)})

    async def change_payment(request: Request, db: Database) -> Response:
        await apoint("in_handler")
        payment = request.path_params["payment"]
        before, currency = await found(db, payment)
        if request.headers.get("if-match", etag(before)) != etag(before):
            raise HTTPException(412)
        after = before + (await request.json())["add_cents"]
        await db.execute("UPDATE payments SET amount_cents = :after WHERE id = :id", after=after, id=payment)
        await apoint("after_effect")
        return JSONResponse(shown(payment, after, currency), headers={"ETag": etag(after)})

    async def delete_payment(request: Request, db: Database) -> Response:
        payment = request.path_params["payment"]
        _ = await found(db, payment)
        await db.execute("DELETE FROM payments WHERE id = :id", id=payment)
        return Response(status_code=204)

    async def transfer(request: Request, db: Database) -> Response:
        await apoint("in_handler")
        asked = await request.json()
        name = f"tr_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO transfers (id, source, target, amount_cents) "
            "VALUES (:id, :source, :target, :amount)",
            id=name,
            source=asked["from"],
            target=asked["to"],
            amount=asked["amount_cents"],
        )
        for wallet, amount in ((asked["from"], -asked["amount_cents"]), (asked["to"], asked["amount_cents"])):
            await db.execute(
                "INSERT INTO ledger (transfer, wallet, amount_cents) VALUES (:transfer, :wallet, :amount)",
                transfer=name,
                wallet=wallet,
                amount=amount,
            )
            await db.execute(
                "UPDATE wallets SET balance_cents = balance_cents + :amount WHERE id = :id",
                amount=amount,
                id=wallet,
            )
            if wallet == asked["from"]:
                await apoint("between_effects")
        await apoint("after_effect")
        return JSONResponse({"id": name, "amount_cents": asked["amount_cents"]}, 201)

    async def put_wallet(request: Request, db: Database) -> Response:
        wallet, cents = request.path_params["wallet"], (await document(request))["balance_cents"]
        await db.execute(
            "INSERT INTO wallets (id, balance_cents) VALUES (:id, :cents) "
            "ON CONFLICT (id) DO UPDATE SET balance_cents = excluded.balance_cents",
            id=wallet,
            cents=cents,
        )
        return JSONResponse({"id": wallet, "balance_cents": cents})

    async def unkeyed(_: Request, db: Database) -> Response:
        await db.execute("INSERT INTO unkeyed (id) VALUES (:id)", id=uuid.uuid4().hex)
        return JSONResponse({}, 201)

    async def upload(request: Request, db: Database) -> Response:
        await apoint("in_handler")
        name = f"up_{uuid.uuid4().hex}"
        async with request.form() as form:
            file: Any = form["file"]
            await db.execute(
                "INSERT INTO uploads (id, note, filename, size) VALUES (:id, :note, :filename, :size)",
                id=name,
                note=str(form.get("note", "")),
                filename=file.filename or "",
                size=file.size or 0,
            )
        await apoint("after_effect")
        return JSONResponse({"id": name}, 201)

    async def play(request: Request, db: Database) -> Response:
        await apoint("in_handler")
        script = world.script(await request.body(), request.headers.get(settings.names[0]))
        script.fails_before()
        for number in range(script.effects):
            if number:
                await apoint("between_effects")
            await db.execute("INSERT INTO effects (id) VALUES (:id)", id=uuid.uuid4().hex)
        await apoint("after_effect")
        script.fails_after()
        if script.refuses:
            raise HTTPException(script.refuses)
        if script.chunks is not None:
            response: Response = StreamingResponse(script.chunks, script.status)
        else:
            response = Response(script.body, script.status)
        for name, value in script.headers:
            response.headers.append(name, value)
        return response

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(world.metrics())

    def plain(path: str, handler: Handler, method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            await account(request)
            async with stack.lent() as db:
                return await handler(request, db)

        return Route(path, endpoint, methods=[method])

    def keyed(path: str, handler: Handler, method: str = "POST", parse: Any = None) -> Route:
        if method not in settings.methods:
            return plain(path, handler, method)

        @once.keyed(parse=parse)
        async def endpoint(request: Request) -> Response:
            return await handler(request, Database(once.connection(request)))

        return Route(path, endpoint, methods=[method], middleware=[Middleware(once.Edge)])

    routes = [
        *(keyed(path, create_payment, parse=valid_payment) for path in settings.payment_paths),
        plain("/payments/{payment}", read_payment, "GET"),
        keyed("/payments/{payment}", change_payment, "PATCH", parse=document),
        keyed("/payments/{payment}", change_payment, parse=document),
        keyed("/payments/{payment}", delete_payment, "DELETE"),
        keyed("/transfers", transfer, parse=document),
        keyed("/wallets/{wallet}", put_wallet, "PUT"),
        keyed("/script", play),
        keyed("/form", form_payment, parse=valid_form),
        keyed("/upload", upload, parse=valid_upload),
        plain("/unkeyed", unkeyed, "POST"),
        Route("/metrics", metrics),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["https://shop.example"],
        allow_methods=["*"],
        allow_headers=[*settings.names, "content-type", "authorization"],
        expose_headers=["Location", "ETag", "Retry-After", settings.replay_header],
    )
    return Starlette(routes=routes, middleware=[cors]), once
