"""The reference application on FastAPI: payments, transfers, wallets, and a handler that plays any answer.

    app, once = create_app(Stack.named("asyncpg", url), Settings(), World())

Keyed routes are marked with ``once.keyed()``; their work and their saved answer commit together.
"""

import logging
import uuid
from typing import Annotated, Any

from fastapi import (
    APIRouter,
    Depends,
    FastAPI,
    File,
    Form,
    Header,
    HTTPException,
    Request,
    Response,
    UploadFile,
)
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field, StrictInt

from taptwice.conformance.apps.world import Script, Unknown, Withdrawn, World
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import Database, Stack
from taptwice.faults import apoint
from taptwice.http.fastapi import Idempotency, IdempotentRoute

logger = logging.getLogger("shop")


class PaymentIn(BaseModel):
    amount_cents: StrictInt = Field(gt=0)
    currency: str = Field(pattern="^[a-z]{3}$")
    card: str | None = None
    sleep_ms: int = 0


class PatchIn(BaseModel):
    add_cents: int


class TransferIn(BaseModel):
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    amount_cents: StrictInt = Field(gt=0)


class WalletIn(BaseModel):
    balance_cents: int


def create_app(stack: Stack, settings: Settings, world: World) -> tuple[FastAPI, Idempotency]:
    """The application, and the `once` of its keyed routes."""

    async def account(request: Request, authorization: Annotated[str | None, Header()] = None) -> str | None:
        """Who is calling. Runs, and refuses, before a key is looked at."""
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

    async def database(
        connection: Annotated[Any, Depends(once.session if stack.sessions else once.connection)],
    ) -> Database:
        return Database(connection)

    DB = Annotated[Database, Depends(database)]
    router = APIRouter(route_class=IdempotentRoute)
    keyed = [once.keyed()]

    def also(method: str) -> list[Any]:
        """Keyed only where the service says that this method takes keys."""
        return keyed if method in settings.methods else []

    def shown(payment: str, amount_cents: int, currency: str) -> dict[str, Any]:
        body = {"id": payment, "amount_cents": amount_cents, "currency": currency}
        return {**body, "object": "payment"} if settings.payments_response == "v2" else body

    def etag(amount_cents: int) -> str:
        return f'"{amount_cents}"'

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
        await db.commit()
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

    async def create_payment(body: PaymentIn, db: DB) -> Response:
        await stack.sleep(body.sleep_ms / 1000)
        return await pay(db, body.amount_cents, body.currency, body.card)

    async def form_payment(
        amount_cents: Annotated[int, Form(gt=0)], currency: Annotated[str, Form()], db: DB
    ) -> Response:
        return await pay(db, amount_cents, currency)

    async def read_payment(payment: str, db: DB) -> Response:
        amount_cents, currency = await found(db, payment, settings.read_from)
        return JSONResponse(shown(payment, amount_cents, currency), headers={"ETag": etag(amount_cents)})

    async def change_payment(
        payment: str, body: PatchIn, db: DB, if_match: Annotated[str | None, Header()] = None
    ) -> Response:
        await apoint("in_handler")
        before, currency = await found(db, payment)
        if if_match is not None and if_match != etag(before):
            raise HTTPException(412)
        after = before + body.add_cents
        await db.execute("UPDATE payments SET amount_cents = :after WHERE id = :id", after=after, id=payment)
        await apoint("after_effect")
        await db.commit()
        return JSONResponse(shown(payment, after, currency), headers={"ETag": etag(after)})

    async def delete_payment(payment: str, db: DB) -> Response:
        await found(db, payment)
        await db.execute("DELETE FROM payments WHERE id = :id", id=payment)
        await db.commit()
        return Response(status_code=204)

    async def transfer(body: TransferIn, db: DB) -> Response:
        await apoint("in_handler")
        name = f"tr_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO transfers (id, source, target, amount_cents) "
            "VALUES (:id, :source, :target, :amount)",
            id=name,
            source=body.source,
            target=body.target,
            amount=body.amount_cents,
        )
        for wallet, amount in ((body.source, -body.amount_cents), (body.target, body.amount_cents)):
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
            if wallet == body.source:
                await apoint("between_effects")
        await apoint("after_effect")
        await db.commit()
        return JSONResponse({"id": name, "amount_cents": body.amount_cents}, 201)

    async def put_wallet(wallet: str, body: WalletIn, db: DB) -> Response:
        await db.execute(
            "INSERT INTO wallets (id, balance_cents) VALUES (:id, :cents) "
            "ON CONFLICT (id) DO UPDATE SET balance_cents = excluded.balance_cents",
            id=wallet,
            cents=body.balance_cents,
        )
        await db.commit()
        return JSONResponse({"id": wallet, "balance_cents": body.balance_cents})

    async def unkeyed(db: DB) -> Response:
        await db.execute("INSERT INTO unkeyed (id) VALUES (:id)", id=uuid.uuid4().hex)
        await db.commit()
        return JSONResponse({}, 201)

    async def upload(
        file: Annotated[UploadFile, File()], db: DB, note: Annotated[str, Form()] = ""
    ) -> Response:
        await apoint("in_handler")
        name = f"up_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO uploads (id, note, filename, size) VALUES (:id, :note, :filename, :size)",
            id=name,
            note=note,
            filename=file.filename or "",
            size=file.size or 0,
        )
        await apoint("after_effect")
        await db.commit()
        return JSONResponse({"id": name}, 201)

    async def script_in(request: Request) -> Script:
        return world.script(await request.body(), request.headers.get(settings.names[0]))

    async def play(script: Annotated[Script, Depends(script_in)], db: DB) -> Response:
        await apoint("in_handler")
        script.fails_before()
        for number in range(script.effects):
            if number:
                await apoint("between_effects")
            await db.execute("INSERT INTO effects (id) VALUES (:id)", id=uuid.uuid4().hex)
        await apoint("after_effect")
        script.fails_after()
        if script.refuses:
            raise HTTPException(script.refuses)
        await db.commit()
        if script.chunks is not None:
            response: Response = StreamingResponse(script.chunks, script.status)
        else:
            response = Response(script.body, script.status)
        for name, value in script.headers:
            response.headers.append(name, value)
        return response

    async def metrics() -> Response:
        return PlainTextResponse(world.metrics())

    def add(path: str, handler: Any, methods: list[str], marked: list[Any]) -> None:
        router.add_api_route(path, stack.endpoint(handler), methods=methods, dependencies=marked)

    for path in settings.payment_paths:
        add(path, create_payment, ["POST"], keyed)
    add("/payments/{payment}", read_payment, ["GET", "HEAD"], [])
    add("/payments/{payment}", change_payment, ["PATCH"], also("PATCH"))
    add("/payments/{payment}", change_payment, ["POST"], keyed)
    add("/payments/{payment}", delete_payment, ["DELETE"], also("DELETE"))
    add("/transfers", transfer, ["POST"], keyed)
    add("/wallets/{wallet}", put_wallet, ["PUT"], also("PUT"))
    add("/script", play, ["POST"], keyed)
    add("/form", form_payment, ["POST"], keyed)
    add("/upload", upload, ["POST"], keyed)
    add("/unkeyed", unkeyed, ["POST"], [])
    router.add_api_route("/metrics", metrics)

    app = FastAPI(openapi_url=None)
    app.include_router(router)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["https://shop.example"],
        allow_methods=["*"],
        allow_headers=[*settings.names, "content-type", "authorization"],
        expose_headers=["Location", "ETag", "Retry-After", settings.replay_header],
    )
    return app, once
