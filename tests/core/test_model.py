"""The values: what two pairs share, and what a row of headers keeps."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taptwice.core.model import Answer, Keyed, key_hash, pack_headers, unpack_headers


def test_the_identity_of_a_pair_is_fixed_for_ever() -> None:
    """Rows of earlier releases must be found by later ones."""
    keyed = Keyed("acct_42", "k")
    assert keyed.id == Keyed("acct_42", "k").id
    assert len(keyed.id) == 16
    assert keyed.id.hex() == "56cc3f8c86dd1bee3148e539553b878f"
    assert keyed.lock == int.from_bytes(keyed.id[:8], "big", signed=True)


def test_pairs_cannot_be_glued_into_one_another() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a\0b", "c"), ("a", "b\0c"), ("c", "ab")]
    for one, other in itertools.combinations(pairs, 2):
        assert Keyed(*one).id != Keyed(*other).id


@given(st.text(), st.text())
def test_any_text_has_an_identity_and_a_lock_that_fits(account: str, key: str) -> None:
    keyed = Keyed(account, key)
    assert len(keyed.id) == 16
    assert -(2**63) <= keyed.lock < 2**63


def test_values_do_not_change_and_do_not_show_what_they_should_not() -> None:
    keyed = Keyed("acct", "k")
    with pytest.raises(dataclasses.FrozenInstanceError):
        keyed.account = "other"  # type: ignore[misc]
    assert "id=" not in repr(keyed)
    assert keyed == Keyed("acct", "k")
    assert hash(keyed) == hash(Keyed("acct", "k"))


def test_the_form_of_a_key_in_logs() -> None:
    assert key_hash("secret") == key_hash("secret")
    assert len(key_hash("secret")) == 16
    assert key_hash("a") != key_hash("b")
    assert key_hash("\ud800")


def test_an_answer() -> None:
    answer = Answer(201, (("Location", "/1"), ("link", "a"), ("Link", "b")), b'{"a":1}')
    assert answer.json() == {"a": 1}
    assert answer.header("LOCATION") == "/1"
    assert answer.header("link") == "a"
    assert answer.header("etag") is None
    assert Answer(200, (), None).json() is None


header_text = st.text(
    st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"), max_size=20
)
names = st.text("abcdefgh-", min_size=1, max_size=8)


@given(st.lists(st.tuples(names, header_text), max_size=5).map(tuple))
def test_header_lines_come_back_as_they_were(headers: tuple[tuple[str, str], ...]) -> None:
    assert unpack_headers(pack_headers(headers)) == headers


def test_a_value_with_a_line_end_stays_one_line() -> None:
    packed = pack_headers((("location", "/1\r\nset-cookie: a=b"), ("link", "\0")))
    assert unpack_headers(packed) == (("location", "/1  set-cookie: a=b"), ("link", " "))


def test_no_header_takes_no_room() -> None:
    assert pack_headers(()) == b""
    assert unpack_headers(b"") == ()
