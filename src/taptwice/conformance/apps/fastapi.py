"""The reference application on FastAPI: payments, transfers, wallets, and a handler that plays any answer.

    app = create_app(Stack.named("asyncpg", url), Settings())

Keyed routes are marked with ``once.keyed()``; their work and their saved answer commit together.
"""

import asyncio
import base64
import json
import logging
import uuid
from collections import Counter
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
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, StrictInt

from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import Database, Stack
from taptwice.faults import point
from taptwice.http.fastapi import Idempotency, IdempotentRoute

logger = logging.getLogger("shop")

TOKENS = {
    "acct_a": ("a", ""),
    "acct_a_token2": ("a", ""),
    "acct_a/user1": ("a", "user1"),
    "acct_a/user2": ("a", "user2"),
    "acct_b": ("b", ""),
    "acct_rw": ("rw", ""),
}
"""Bearer token -> account and user."""


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


class Shop:
    """What the handlers share: the permissions, and how often each scripted request has been executed."""

    def __init__(self) -> None:
        self.withdrawn: set[str] = set()
        self.executions: Counter[str] = Counter()
        self.payments_response = "v1"


def create_app(stack: Stack, settings: Settings) -> FastAPI:
    """The application. Its state holds `once` and `shop`."""
    shop = Shop()
    shop.payments_response = settings.payments_response

    async def account(request: Request, authorization: Annotated[str | None, Header()] = None) -> str | None:
        """Who is calling. Runs, and refuses, before a key is looked at."""
        if authorization is None and settings.auth == "optional":
            return None
        token = (authorization or "").removeprefix("Bearer ")
        if token.startswith("tenant:"):
            whose, user = token.removeprefix("tenant:"), ""
        elif token in TOKENS:
            whose, user = TOKENS[token]
        else:
            raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
        if token in shop.withdrawn:
            raise HTTPException(403)
        if settings.read_before_claim:
            await stack.reading("SELECT balance_cents FROM wallets")
        return settings.account_of(whose, user, request.headers)

    once = Idempotency(stack.origin, account=account, policy=settings.policy())

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
        return {**body, "object": "payment"} if shop.payments_response == "v2" else body

    def etag(amount_cents: int) -> str:
        return f'"{amount_cents}"'

    async def pay(db: Database, amount_cents: int, currency: str, card: str | None = None) -> Response:
        await point("in_handler")
        if card == "tok_declined_once":
            shop.executions[card] += 1
        if card == "tok_declined" or (card == "tok_declined_once" and shop.executions[card] == 1):
            return JSONResponse({"error": "card declined"}, 402)
        payment = f"pay_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO payments (id, amount_cents, currency) VALUES (:id, :amount, :currency)",
            id=payment,
            amount=amount_cents,
            currency=currency,
        )
        await point("after_effect")
        await db.commit()
        logger.info("payment accepted")
        headers = {"Location": f"/payments/{payment}", "ETag": etag(amount_cents)}
        return JSONResponse(shown(payment, amount_cents, currency), 201, headers)

    async def found(db: Database, payment: str) -> tuple[int, str]:
        rows = await db.execute("SELECT amount_cents, currency FROM payments WHERE id = :id", id=payment)
        if not rows:
            raise HTTPException(404)
        return rows[0][0], rows[0][1]

    async def create_payment(body: PaymentIn, db: DB) -> Response:
        if body.sleep_ms:
            await asyncio.sleep(body.sleep_ms / 1000)
        return await pay(db, body.amount_cents, body.currency, body.card)

    async def form_payment(
        amount_cents: Annotated[int, Form(gt=0)], currency: Annotated[str, Form()], db: DB
    ) -> Response:
        return await pay(db, amount_cents, currency)

    async def read_payment(payment: str, db: DB) -> Response:
        amount_cents, currency = await found(db, payment)
        return JSONResponse(shown(payment, amount_cents, currency), headers={"ETag": etag(amount_cents)})

    async def change_payment(
        payment: str, body: PatchIn, db: DB, if_match: Annotated[str | None, Header()] = None
    ) -> Response:
        await point("in_handler")
        before, currency = await found(db, payment)
        if if_match is not None and if_match != etag(before):
            raise HTTPException(412)
        after = before + body.add_cents
        await db.execute("UPDATE payments SET amount_cents = :after WHERE id = :id", after=after, id=payment)
        await point("after_effect")
        await db.commit()
        return JSONResponse(shown(payment, after, currency), headers={"ETag": etag(after)})

    async def delete_payment(payment: str, db: DB) -> Response:
        await found(db, payment)
        await db.execute("DELETE FROM payments WHERE id = :id", id=payment)
        await db.commit()
        return Response(status_code=204)

    async def transfer(body: TransferIn, db: DB) -> Response:
        await point("in_handler")
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
                await point("between_effects")
        await point("after_effect")
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
        await point("in_handler")
        name = f"up_{uuid.uuid4().hex}"
        await db.execute(
            "INSERT INTO uploads (id, note, filename, size) VALUES (:id, :note, :filename, :size)",
            id=name,
            note=note,
            filename=file.filename or "",
            size=file.size or 0,
        )
        await point("after_effect")
        await db.commit()
        return JSONResponse({"id": name}, 201)

    async def script_in(request: Request) -> dict[str, Any]:
        """What the request wants to be answered."""
        try:
            described = json.loads(await request.body())
        except ValueError:
            return {}
        return described if isinstance(described, dict) else {}

    async def play(
        request: Request, script: Annotated[dict[str, Any], Depends(script_in)], db: DB
    ) -> Response:
        await point("in_handler")
        answer = dict(script)
        if "times" in script:
            # Counted in memory: an execution that is undone leaves nothing in the database.
            name = json.dumps([script, request.headers.get(settings.names[0])], sort_keys=True)
            shop.executions[name] += 1
            if shop.executions[name] > script["times"]:
                answer = {**script, "raise": None, "raise_http": None, **script.get("then", {})}
        if answer.get("raise") == "before_effect":
            raise RuntimeError("the script raises")
        for number in range(answer.get("effect", 1)):
            if number:
                await point("between_effects")
            await db.execute("INSERT INTO effects (id) VALUES (:id)", id=uuid.uuid4().hex)
        await point("after_effect")
        if answer.get("raise"):
            raise RuntimeError("the script raises")
        if answer.get("raise_http"):
            raise HTTPException(answer["raise_http"])
        await db.commit()
        return _scripted(answer)

    def add(path: str, handler: Any, methods: list[str], marked: list[Any]) -> None:
        router.add_api_route(path, stack.endpoint(handler), methods=methods, dependencies=marked)

    for path in settings.payment_paths:
        add(path, create_payment, ["POST"], keyed)
    add("/payments/{payment}", read_payment, ["GET", "HEAD"], [])
    add("/payments/{payment}", change_payment, ["PATCH"], keyed)
    add("/payments/{payment}", change_payment, ["POST"], keyed)
    add("/payments/{payment}", delete_payment, ["DELETE"], also("DELETE"))
    add("/transfers", transfer, ["POST"], keyed)
    add("/wallets/{wallet}", put_wallet, ["PUT"], also("PUT"))
    add("/script", play, ["POST"], keyed)
    add("/form", form_payment, ["POST"], keyed)
    add("/upload", upload, ["POST"], keyed)
    add("/unkeyed", unkeyed, ["POST"], [])

    app = FastAPI(openapi_url=None)
    app.state.once, app.state.shop = once, shop
    app.include_router(router)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["https://shop.example"],
        allow_methods=["*"],
        allow_headers=["idempotency-key", "content-type", "authorization"],
    )
    return app


def _scripted(answer: dict[str, Any]) -> Response:
    status = answer.get("status", 200)
    if "chunks" in answer:
        response: Response = StreamingResponse(iter(answer["chunks"]), status)
    elif "body_b64" in answer:
        response = Response(base64.b64decode(answer["body_b64"]), status)
    elif "body_size" in answer:
        response = Response(b"x" * answer["body_size"], status)
    else:
        response = Response(answer.get("body", ""), status)
    for name, value in answer.get("headers", ()):
        response.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
    return response
