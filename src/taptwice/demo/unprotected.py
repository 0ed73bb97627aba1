"""Not to be copied: the same work without a key. Whoever sends the request twice is charged twice."""

from __future__ import annotations

from fastapi import APIRouter

from taptwice.demo.service import DB, Account, Charged, Payment, charge

router = APIRouter()


@router.post("/v1/unprotected/payments", status_code=201)
async def pay(payment: Payment, account: Account, db: DB) -> Charged:
    charged = await charge(payment, account, db)
    await db.commit()
    return charged
