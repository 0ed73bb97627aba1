"""URLs are merged once, and what comes out is what the library would have made of them each time."""

from __future__ import annotations

from typing import Any

import httpx
import httpx2
import pytest

from taptwice.client.http import Client
from taptwice.client.testing import ScriptedServer
from taptwice.client.urls import Urls

BASES = ["", "https://api.example.com", "https://user:secret@api.example.com:8443/v1/", "http://[::1]/a?b=c"]
ASKED = [
    "",
    "/",
    "p",
    "/p",
    "//p",
    "../p",
    "/p?q=1&r=%20",
    "/ö p",
    "?q",
    "https://elsewhere.example/x",
    "/a#b",
]


@pytest.mark.parametrize("library", [httpx2, httpx], ids=lambda library: library.__name__)
@pytest.mark.parametrize("base", BASES)
def test_as_the_library_merges_them(library: Any, base: str) -> None:
    with library.Client(base_url=base, params={"client": "1"}) as http:
        urls = Urls(http)
        for asked in ASKED * 2:
            for given in ({}, {"params": {"call": "2"}}):
                theirs = http.build_request("GET", asked, **given)
                ours = http.build_request("GET", urls.merged(asked), **given)
                assert (ours.url, ours.url.raw_path) == (theirs.url, theirs.url.raw_path)
                assert ours.headers == theirs.headers
        assert urls.merged("/p") is urls.merged("/p")


def test_a_url_of_the_librarys_own_is_left_alone() -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        client.get(httpx2.URL("/p"))  # type: ignore[arg-type]
        client.get(httpx2.URL(f"{server.url}/q"))  # type: ignore[arg-type]
        assert [request.target for request in server.requests] == ["/p", "/q"]


def test_the_base_may_be_set_anew() -> None:
    with ScriptedServer() as one, ScriptedServer() as two, httpx2.Client(base_url=one.url) as http:
        client = Client(http=http)
        client.get("/p")
        http.base_url = two.url
        client.get("/p")
        assert (len(one.requests), len(two.requests)) == (1, 1)


def test_no_more_are_kept_than_a_program_has_places_to_call() -> None:
    with httpx2.Client(base_url="https://api.example.com") as http:
        urls = Urls(http)
        for number in range(1000):
            assert urls.merged(f"/{number}") == f"https://api.example.com/{number}"
        assert len(urls._merged) <= 64
