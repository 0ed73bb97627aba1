"""A payments service with one keyed operation. It is complete: copy it, and put your work into `charge`.

To run it alone:

    taptwice init --database sqlite:///payments.db
    DATABASE_URL=sqlite+aiosqlite:///payments.db uvicorn taptwice.demo.service:app

The first line makes the table for the saved answers; that of the charges it makes itself.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from taptwice.http.fastapi import Idempotency, IdempotentRoute

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///payments.db"))
Session = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[str]
    amount_cents: Mapped[int]
    currency: Mapped[str]


class Payment(BaseModel):
    amount_cents: int = Field(gt=0, le=100_000_000)
    currency: str = Field(pattern="^[a-z]{3}$")


class Charged(BaseModel):
    charge_id: int
    amount_cents: int


async def current_account(authorization: Annotated[str | None, Header()] = None) -> str:
    """Your login. It runs before anything is replayed; an account is never taken from the body."""
    scheme, _, account = (authorization or "").partition(" ")
    if scheme != "Bearer" or not account:
        raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
    return account


once = Idempotency(Session, account=current_account)
Account = Annotated[str, Depends(current_account)]
DB = Annotated[AsyncSession, Depends(once.session)]

router = APIRouter(route_class=IdempotentRoute)


@router.post("/v1/payments", status_code=201, dependencies=[once.keyed()])
async def pay(payment: Payment, account: Account, db: DB) -> Charged:
    return await charge(payment, account, db)  # no commit: it comes with the saved answer


@router.get("/v1/payments")
async def payments(account: Account, db: DB, amount_cents: int | None = None) -> list[Charged]:
    query = select(Charge).where(Charge.account_id == account).order_by(Charge.id)
    if amount_cents is not None:
        query = query.where(Charge.amount_cents == amount_cents)
    return [Charged(charge_id=row.id, amount_cents=row.amount_cents) for row in await db.scalars(query)]


async def charge(payment: Payment, account: str, db: AsyncSession) -> Charged:
    """The work: whatever it writes to this database happens together with the answer, or not at all."""
    await review(payment)
    row = Charge(account_id=account, amount_cents=payment.amount_cents, currency=payment.currency)
    db.add(row)
    await db.flush()
    return Charged(charge_id=row.id, amount_cents=row.amount_cents)


async def review(payment: Payment) -> None:
    """Limits, fraud rules, a ledger: where real work takes its time. The demo makes it slow on purpose."""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)  # yours has migrations
    yield
    await engine.dispose()


app = FastAPI(title="Payments", lifespan=lifespan)
app.include_router(router)
