"""The settings of a keyed route: what they accept, what they refuse, and what is saved."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from taptwice.core.policy import NEVER_SAVED, PROFILES, Policy, changed, profile, seconds
from taptwice.errors import Misuse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((0, 0.0), (5, 5.0), (0.25, 0.25), ("250ms", 0.25), ("5s", 5.0), ("1.5s", 1.5), ("10m", 600.0)),
        *(("24h", 86400.0), ("7d", 604800.0), (" 5s ", 5.0), ("0s", 0.0)),
    ],
)
def test_durations(text: float | str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "-5s", "5S", "1w", "1h30m", ".5s", "٣s", -1, float("nan"), float("inf")]
)
def test_what_is_no_duration(text: float | str) -> None:
    with pytest.raises(Misuse, match="not a duration"):
        seconds(text)


def test_the_defaults() -> None:
    policy = Policy()
    assert policy.required
    assert policy.methods == {"POST", "PATCH"}
    assert (policy.window_s, policy.wait_s) == (86400.0, 5.0)
    assert (policy.save_max_body, policy.request_max_body) == (1 << 20, 10 << 20)
    assert policy.save == "final"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"methods": {"GET", "POST"}}, "safe methods"),
        ({"methods": {"head"}}, "safe methods"),
        ({"save": "everything"}, "choose"),
        ({"save_max_body": -1}, "save_max_body"),
        ({"request_max_body": -1}, "request_max_body"),
        ({"retry_after": -1}, "retry_after"),
        ({"window": 0}, "window"),
        ({"window": "soon"}, "duration"),
        ({"wait": "-1s"}, "duration"),
    ],
)
def test_what_is_refused_where_it_is_written(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Policy(**settings)


def test_methods_are_written_in_any_case() -> None:
    assert Policy(methods=frozenset({"post", "Delete"})).methods == {"POST", "DELETE"}


@pytest.mark.parametrize(
    ("save", "kept"),
    [
        ("final", {*range(200, 500)} - NEVER_SAVED),
        ("success", {*range(200, 400)}),
        ("all-after-start", {*range(100, 600)}),
    ],
)
def test_which_answers_are_saved(save: Any, kept: set[int]) -> None:
    policy = Policy(save=save)
    assert {status for status in range(100, 600) if policy.keeps(status)} == kept


def test_what_is_never_saved() -> None:
    assert {401, 407, 408, 421, 425, 426, 429, 431} == NEVER_SAVED


def test_which_headers_are_kept() -> None:
    headers = (
        ("Content-Type", "text/plain"),
        ("Set-Cookie", "a=1"),
        ("LINK", "1"),
        ("Link", "2"),
        ("Date", "now"),
        ("Content-Length", "3"),
        ("WWW-Authenticate", "Basic"),
        ("etag", '"x"'),
    )
    kept = Policy().kept_headers(headers)
    assert kept == (("content-type", "text/plain"), ("link", "1"), ("link", "2"), ("etag", '"x"'))
    assert Policy(replay_allow=()).kept_headers(headers) == ()
    assert Policy(replay_allow=("DATE",)).kept_headers(headers) == (("date", "now"),)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_policies(name: str) -> None:
    assert isinstance(profile(name), Policy)


def test_a_profile_with_a_change() -> None:
    stripe = profile("stripe-v1", required=True, window="7d")
    assert (stripe.save, stripe.status, stripe.wait_s) == ("all-after-start", {"key-reused": 400}, 0.0)
    assert (stripe.required, stripe.window_s) == (True, 604800.0)
    assert profile("draft").key.strict


def test_a_profile_that_does_not_exist() -> None:
    with pytest.raises(Misuse, match="draft, stripe-v1"):
        profile("stripe")


def test_changes() -> None:
    policy = Policy(window="7d")
    assert changed(policy, wait=0) == dataclasses.replace(policy, wait=0)
    assert changed(policy) == policy
    with pytest.raises(Misuse, match=r"no setting windw; there are .*window"):
        changed(policy, windw="1h")
    with pytest.raises(Misuse, match="duration"):
        changed(policy, window="soon")
