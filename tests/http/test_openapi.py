"""What a keyed route adds to the OpenAPI document."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from taptwice.core.header import KeySyntax
from taptwice.core.policy import profile
from taptwice.http.fastapi import Idempotency, IdempotentRoute
from tests.http.fastapi_stacks import ChargeIn, account


class OutOfStock(BaseModel):
    item: str


async def endpoint(body: ChargeIn) -> ChargeIn:
    return body


async def without_input() -> str:
    return ""


def operation(
    once: Idempotency | None = None,
    endpoint: Any = endpoint,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    document = whole(once, endpoint, policy, **options)
    found: dict[str, Any] = document["paths"]["/v1/charges"]["post"]
    return found


def whole(
    once: Idempotency | None = None,
    endpoint: Any = endpoint,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    once = once or Idempotency(lambda: None, account=account)
    router = APIRouter(route_class=IdempotentRoute)
    options.setdefault("status_code", 201)
    router.post("/charges", dependencies=[once.keyed(**(policy or {}))], **options)(endpoint)
    router.post("/plain")(endpoint)
    app = FastAPI()
    app.include_router(router, prefix="/v1")
    return app.openapi()


def header(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["parameters"] if each["name"] == "Idempotency-Key"]


def test_the_header() -> None:
    [parameter] = header(operation())
    assert parameter["in"] == "header"
    assert parameter["required"] is True
    assert parameter["schema"] == {"type": "string", "minLength": 1, "maxLength": 255}
    assert "86400 seconds" in parameter["description"]
    [optional] = header(
        operation(policy={"required": False, "window": "1h", "key": KeySyntax(uuid=True, max_length=36)})
    )
    assert optional["required"] is False
    assert optional["schema"] == {"type": "string", "minLength": 1, "maxLength": 36, "format": "uuid"}
    assert operation(policy={"window": "1h"})["x-idempotency-window-seconds"] == 3600


def test_a_key_in_the_body_is_no_header() -> None:
    found = operation(policy={"key_pointer": "/key"})
    assert header(found) == []
    assert found["x-idempotency-window-seconds"] == 86400


def test_the_refusals() -> None:
    responses = operation()["responses"]
    assert set(responses) == {"201", "400", "409", "422", "503"}
    for status in ("400", "409", "422", "503"):
        assert responses[status]["description"]
        assert responses[status]["content"]["application/problem+json"]["schema"]["properties"]["type"]
    assert "Retry-After" in responses["409"]["headers"]
    assert "Retry-After" in responses["503"]["headers"]


def test_the_marker_stands_beside_the_answer() -> None:
    success = operation()["responses"]["201"]
    assert "Idempotent-Replayed" in success["headers"]
    assert success["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChargeIn"}
    redirect = operation(endpoint=without_input, response_class=RedirectResponse, status_code=None)[
        "responses"
    ]
    assert "Idempotent-Replayed" in redirect["307"]["headers"]
    assert "200" not in redirect


def test_fastapis_own_422_stays() -> None:
    document = whole()
    content = document["paths"]["/v1/charges"]["post"]["responses"]["422"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/HTTPValidationError"}
    assert "application/problem+json" in content
    assert "HTTPValidationError" in document["components"]["schemas"]


def test_an_operation_without_input_has_a_422_all_the_same() -> None:
    once = Idempotency(lambda: None, account=lambda: "acct")
    found = operation(once, without_input)["responses"]["422"]
    assert found["description"]
    assert list(found["content"]) == ["application/problem+json"]


def test_what_the_route_says_itself_stays() -> None:
    own: dict[Any, Any] = {
        409: {"model": OutOfStock, "description": "Out of stock"},
        "422": {"description": "Not acceptable"},
        404: {"description": "No such thing"},
        201: {"headers": {"X-Own": {"schema": {"type": "string"}}}},
    }
    extra = {"parameters": [{"name": "X-Trace", "in": "header"}], "x-mine": 1}
    found = operation(responses=own, openapi_extra=extra)
    responses = found["responses"]
    assert responses["409"]["description"] == "Out of stock"
    assert set(responses["409"]["content"]) == {"application/json", "application/problem+json"}
    assert responses["422"]["description"] == "Not acceptable"
    assert responses["404"]["description"] == "No such thing"
    assert set(responses["201"]["headers"]) == {"X-Own", "Idempotent-Replayed"}
    assert found["x-mine"] == 1
    assert [each["name"] for each in found["parameters"]].count("X-Trace") == 1
    assert len(header(found)) == 1


def test_mapped_statuses_are_told_together() -> None:
    once = Idempotency(lambda: None, account=account, policy=profile("stripe-v1"))
    responses = operation(once)["responses"]
    assert "missing or malformed" in responses["400"]["description"]
    assert "used before" in responses["400"]["description"]
    assert list(responses["422"]["content"]) == ["application/json"], "only FastAPI's own is left"


def test_neighbours_say_nothing() -> None:
    plain = whole()["paths"]["/v1/plain"]["post"]
    assert set(plain["responses"]) == {"200", "422"}
    assert "parameters" not in plain
    assert "x-idempotency-window-seconds" not in plain


@pytest.mark.parametrize("times", [1, 2])
def test_a_router_that_is_included_again_says_everything_once(times: int) -> None:
    once = Idempotency(lambda: None, account=account)
    router = APIRouter(route_class=IdempotentRoute)
    router.post("/charges", dependencies=[once.keyed()])(endpoint)
    outer = APIRouter()
    outer.include_router(router, prefix="/a")
    app = FastAPI()
    for n in range(times):
        app.include_router(outer, prefix=f"/{n}")
    for n in range(times):
        found = app.openapi()["paths"][f"/{n}/a/charges"]["post"]
        assert len(header(found)) == 1
