"""What is held back and what passes, without a framework: messages in, instructions out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taptwice.core.model import Answer
from taptwice.core.policy import Policy
from taptwice.http.edge import Conclude, Hold, Holding, Message, Pass, messages_of

CAP = 10
POLICY = Policy(save_max_body=CAP)
CAPTURE = Policy(save_max_body=CAP, streams="capture")


def start(status: int = 200, length: int | str | None = None, **more: Any) -> Message:
    headers = [(b"x-kept", b"1")]
    if length is not None:
        headers.append((b"Content-Length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers, **more}


def body(content: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def whole(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content}


def feed(messages: list[Message], policy: Policy = POLICY) -> list[Pass | Hold | Conclude]:
    holding = Holding(policy)
    return [holding.feed(message) for message in messages]


def concluded(results: list[Pass | Hold | Conclude]) -> tuple[int, Conclude]:
    """At which message the answer was known, and what was concluded; exactly one may be."""
    [found] = [(at, result) for at, result in enumerate(results) if isinstance(result, Conclude)]
    return found


@pytest.mark.parametrize("chunks", [[b"0123456789"], [b"", b"01234", b"", b"56789"], [b"0123456789", b""]])
def test_a_body_of_known_length_within_the_cap_is_held_to_its_end(chunks: list[bytes]) -> None:
    first = start(201, CAP)
    results = feed([first, *(body(chunk, True) for chunk in chunks[:-1]), body(chunks[-1])])
    at, result = concluded(results)
    assert at == len(chunks)
    assert all(isinstance(each, Hold) for each in results[:at])
    assert result.answer.status == 201
    assert result.answer.body == b"0123456789"
    assert result.answer.header("x-kept") == "1"
    assert result.messages == (first, whole(b"0123456789"))


@pytest.mark.parametrize("length", [None, CAP + 1, 10**30, "ten", "-1", ""])
def test_a_body_of_unknown_or_large_length_is_a_stream_from_its_start(length: int | str | None) -> None:
    first = start(200, length)
    results = feed([first, body(b"1", True), body(b"2")])
    at, result = concluded(results)
    assert at == 0
    assert result.answer.body is None
    assert result.messages == (first,)
    assert results[1:] == [Pass((body(b"1", True),)), Pass((body(b"2"),))]


def test_a_short_stream_can_be_captured() -> None:
    at, result = concluded(feed([start(), body(b"01", True), body(b"23")], CAPTURE))
    assert at == 2
    assert result.answer.body == b"0123"


def test_a_long_stream_that_was_to_be_captured_goes_on_as_a_stream() -> None:
    first = start()
    results = feed([first, body(b"01234567", True), body(b"89x", True), body(b"end")], CAPTURE)
    at, result = concluded(results)
    assert at == 2
    assert result.answer.body is None
    assert result.messages == (first, body(b"0123456789x", True))
    assert results[3] == Pass((body(b"end"),))


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_status_without_a_body_is_held(status: int) -> None:
    at, result = concluded(feed([start(status), body()]))
    assert at == 1
    assert result.answer == Answer(status, (("x-kept", "1"),), b"")


def test_a_file_sent_by_its_path_is_a_stream() -> None:
    first, path = start(200, CAP), {"type": "http.response.pathsend", "path": "/etc/hosts"}
    at, result = concluded(feed([first, path]))
    assert at == 1
    assert result.answer.body is None
    assert result.messages == (first, path)


def test_trailers_behind_a_held_body_follow_it() -> None:
    trailers = {"type": "http.response.trailers", "headers": []}
    results = feed([start(200, 1, trailers=True), body(b"1"), trailers])
    at, result = concluded(results)
    assert at == 1
    assert result.answer.body == b"1"
    assert results[2] == Pass((trailers,))


def test_trailers_within_a_body_make_it_a_stream() -> None:
    first, trailers = start(200, 5), {"type": "http.response.trailers", "headers": []}
    at, result = concluded(feed([first, body(b"12", True), trailers]))
    assert at == 2
    assert result.answer.body is None
    assert result.messages == (first, body(b"12", True), trailers)


@pytest.mark.parametrize("kind", ["http.response.early_hint", "http.response.debug", "http.response.push"])
def test_informational_messages_pass_before_the_answer(kind: str) -> None:
    hint = {"type": kind}
    results = feed([hint, start(200, 1), body(b"1")])
    assert results[0] == Pass((hint,))
    assert concluded(results)[0] == 2


def test_a_length_that_lies_does_not_cut_what_is_saved() -> None:
    assert concluded(feed([start(200, 2), body(b"0123")]))[1].answer.body == b"0123"
    assert concluded(feed([start(200, 8), body(b"0123")]))[1].answer.body == b"0123"


def test_a_length_that_lies_cannot_make_more_be_held_than_the_cap() -> None:
    at, result = concluded(feed([start(200, 2), body(b"012345", True), body(b"6789xy", True), body(b"z")]))
    assert at == 2
    assert result.answer.body is None


def test_a_last_chunk_above_the_cap_is_concluded_whole() -> None:
    """The exchange makes a tombstone of it; its first client gets it as it is."""
    _, result = concluded(feed([start(200, 2), body(b"0123456789x")]))
    assert result.messages[1] == whole(b"0123456789x")


def test_an_answer_in_place_of_one_that_was_given_up_has_its_own_body_alone() -> None:
    again = start(503, 2)
    _, result = concluded(feed([start(200, 4), body(b"12", True), again, body(b"no")]))
    assert (result.answer.status, result.answer.body) == (503, b"no")
    assert result.messages == (again, whole(b"no"))


@given(
    chunks=st.lists(st.binary(max_size=6), min_size=1, max_size=6),
    length=st.none() | st.integers(0, 20),
    capture=st.booleans(),
)
def test_nothing_is_lost_doubled_or_reordered(chunks: list[bytes], length: int | None, capture: bool) -> None:
    messages = [start(200, length), *(body(chunk, True) for chunk in chunks[:-1]), body(chunks[-1])]
    sent: list[Message] = []
    answers = []
    for result in feed(messages, CAPTURE if capture else POLICY):
        match result:
            case Pass(passed):
                sent.extend(passed)
            case Conclude(answer, passed):
                sent.extend(passed)
                answers.append(answer)
            case _:
                pass
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0] == messages[0]
    assert b"".join(message["body"] for message in sent[1:]) == b"".join(chunks)
    assert [message.get("more_body", False) for message in sent[1:]].count(False) == 1
    assert not sent[-1].get("more_body", False)
    assert len(answers) == 1
    assert answers[0].body in (None, b"".join(chunks))


def test_an_answer_of_ours_as_messages() -> None:
    first, second = messages_of(Answer(409, (("Retry-After", "1"), ("Link", "a"), ("Link", "b")), b"wait"))
    assert first["headers"] == [
        (b"retry-after", b"1"),
        (b"link", b"a"),
        (b"link", b"b"),
        (b"content-length", b"4"),
    ]
    assert second["body"] == b"wait"


@pytest.mark.parametrize("status", [204, 304])
def test_a_replay_without_a_body_carries_no_length(status: int) -> None:
    first, second = messages_of(Answer(status, (), b"ignored"))
    assert first["headers"] == []
    assert second["body"] == b""


def test_a_tombstone_as_messages_has_an_empty_body() -> None:
    first, second = messages_of(Answer(200, (), None))
    assert first["headers"] == [(b"content-length", b"0")]
    assert second["body"] == b""
