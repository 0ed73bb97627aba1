"""Whatever comes over the wire: never a 5xx, and a refusal of the edge stores nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taptwice.core.policy import Policy
from taptwice.http import asgi, starlette
from tests.http.shop import Shop, call, scope_of, sqlite_shop

LIMIT = 200
NAMES = (b"idempotency-key", b"content-type", b"content-length", b"content-encoding", b"authorization", b"x")
FRAGMENTS = (
    *(b"k", b'"k"', b'"', b"\\", b",", b";a=1", b" ", b"\t", b"\x00", b"\xff", b"\xc3\xa4", b"?0", b":YQ==:"),
    *(b"()", b"0", b"-1", b"9" * 40, b"x" * 256, b"gzip", b"application/json", b"multipart/form-data"),
    *(b"; boundary=b", b"application/x-www-form-urlencoded"),
)

values = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=5), max_size=4).map(b"".join)
headers = st.lists(st.tuples(st.sampled_from(NAMES), values), max_size=5)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.one_of(
    st.binary(max_size=LIMIT + 50),
    json_like.map(lambda value: json.dumps(value).encode()),
    st.integers(0, 20_000).map(lambda depth: b"[" * depth),
    st.sampled_from(
        [
            b'{"a":1,"a":2}',
            b"1e999999999",
            b"NaN",
            b"a=1&a=2&%zz",
            b"--b\r\n\r\nx\r\n--b--",
            b"\xef\xbb\xbf{}",
        ]
    ),
)
methods = st.sampled_from(["POST", "PATCH", "PUT", "DELETE", "GET", "HEAD", "OPTIONS", "TRACE", "BREW"])
queries = st.binary(max_size=10)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return sqlite_shop(tmp_path_factory.mktemp("fuzz"), "sqlite3")


def starlette_app(shop: Shop, policy: Policy) -> Any:
    once = starlette.Idempotency(shop.origin, account=lambda request: "acct", policy=policy)

    @once.keyed()
    async def charge(request: Request) -> Response:
        if request.method in policy.methods:
            await shop.insert(once.connection(request), "x")
        await request.body()
        return Response(b"done", 201)

    every = ["POST", "PATCH", "PUT", "DELETE", "GET"]
    return Starlette(routes=[Route("/charges", charge, methods=every, middleware=[Middleware(once.Edge)])])


def asgi_app(shop: Shop, policy: Policy) -> Any:
    once = asgi.Idempotency(shop.origin, policy=policy)

    async def charge(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] in policy.methods:
            await shop.insert(once.connection(scope), "x")
        start = {"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"4")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"done"})

    return once.keyed(charge, account=lambda scope: "acct")


POLICIES = {
    "required": Policy(request_max_body=LIMIT),
    "optional": Policy(request_max_body=LIMIT, required=False),
    "pointer": Policy(request_max_body=LIMIT, key_pointer="/a", required=False),
    "route": Policy(request_max_body=LIMIT, scope="route", uuid7_guard=True),
}


@pytest.mark.parametrize("make", [starlette_app, asgi_app])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    headers=headers, body=bodies, method=methods, query=queries, cut=st.integers(0, 300), again=st.booleans()
)
def test_anything(
    make: Any,
    policy: str,
    shop: Shop,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    method: str,
    query: bytes,
    cut: int,
    again: bool,
) -> None:
    app = make(shop, POLICIES[policy])
    scope = {**scope_of(method, query=query), "headers": headers}
    before = counts(shop)
    for _ in range(1 + again):
        reply = asyncio.run(call(app, dict(scope), body=[body[:cut], body[cut:]]))
        assert 200 <= reply.status < 500, reply.body
        if reply.status >= 400:
            assert counts(shop) == before, "refused, and something is stored"
        before = counts(shop)


def counts(shop: Shop) -> tuple[int, int]:
    both = "SELECT (SELECT count(*) FROM charges), (SELECT count(*) FROM taptwice_records)"
    [(charges, records)] = shop.query(both)
    return charges, records
