"""The adapter for requests: what the cases do not ask."""

from __future__ import annotations

import gc
import io
import pathlib
import socket
import ssl
import warnings
from typing import Any

import pytest
import requests
from urllib3.util import Timeout

from taptwice.client.errors import DeadlineExceeded
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Attempted, Ended, report
from taptwice.client.requests import RetryAdapter
from taptwice.client.testing import ScriptedServer, Step, answer, close, drip, hang, no_wait
from taptwice.core.breaker import CircuitBreaker
from taptwice.errors import CircuitOpen, Misuse
from tests.client.silent import silent

CERTIFICATE = pathlib.Path(__file__).with_name("self_signed.pem")


def session(policy: RetryPolicy = RetryPolicy(), **settings: Any) -> requests.Session:  # noqa: B008
    made = requests.Session()
    made.trust_env = False
    for scheme in ("http://", "https://"):
        made.mount(scheme, RetryAdapter(policy, **settings))
    return made


def tls_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def test_what_it_raises_is_of_requests_and_of_ours() -> None:
    with ScriptedServer([hang]) as server, session(RetryPolicy(deadline=0.1)) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            client.get(server.url)
        assert isinstance(caught.value, requests.Timeout)
        assert caught.value.request is not None
        assert caught.value.request.url == server.url + "/"
        assert report(caught.value).outcome is Outcome.UNKNOWN


def test_an_open_circuit_is_a_connection_error_to_requests() -> None:
    client = session(breaker=lambda: CircuitBreaker(failures=1))
    with ScriptedServer([503]) as server, no_wait(), client:
        assert report(client.get(server.url)).stop_reason is StopReason.CIRCUIT_OPEN
        with pytest.raises(CircuitOpen) as refused:
            client.get(server.url)
        assert isinstance(refused.value, requests.ConnectionError)


@pytest.mark.parametrize("timeout", [0.1, (5, 0.1), Timeout(connect=5, read=0.1)], ids=repr)
def test_the_librarys_own_timeout_holds_beside_ours(timeout: Any) -> None:
    with ScriptedServer([hang, 200]) as server, no_wait(), session(RetryPolicy(per_try=None)) as client:
        response = client.get(server.url, timeout=timeout)
        assert [each.outcome for each in report(response).attempts] == ["unknown", "processed"]


def test_tls_a_certificate_nobody_vouches_for() -> None:
    with ScriptedServer(tls=tls_server()) as server, session() as client:
        with pytest.raises(requests.exceptions.SSLError) as caught:
            client.post(server.url)
        assert (report(caught.value).outcome, len(report(caught.value).attempts)) == (Outcome.NOT_SENT, 1)


def test_tls_the_deadline_holds_and_connections_are_used_again() -> None:
    script: list[Step] = [answer(200, body=b"x"), 200, drip(b"x" * 200, 0.05)]
    client = session(RetryPolicy(deadline=0.4))
    with ScriptedServer(script, tls=tls_server()) as server, client, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # urllib3 on certificates that are not looked at
        for _ in range(2):
            assert client.get(server.url, verify=False).status_code == 200
        assert server.connections == 1
        with pytest.raises(DeadlineExceeded):
            client.get(server.url, verify=False)


def test_addresses_of_a_host_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drops all packets, the second refuses, the third has its share of the deadline left."""
    found_at(monkeypatch, "127.0.0.2", "127.0.0.9", "127.0.0.1")
    with (
        ScriptedServer([200]) as server,
        silent("127.0.0.2", server.port),
        session(RetryPolicy(deadline=1.5)) as client,
    ):
        assert client.get(f"http://many.test:{server.port}/").status_code == 200
        assert server.requests[0].header("Host") == f"many.test:{server.port}"


def test_a_host_of_which_no_address_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found_at(monkeypatch, "127.0.0.9", "127.0.0.2")
    with silent("127.0.0.2", 0) as port, session(RetryPolicy(deadline=0.3)) as client:
        with pytest.raises(requests.RequestException) as caught:
            client.get(f"http://many.test:{port}/")
        assert report(caught.value).outcome is Outcome.NOT_SENT


def found_at(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """What the resolver says of many.test."""
    real = socket.getaddrinfo

    def found(host: Any, *more: Any) -> Any:
        return [real(each, *more)[0] for each in (addresses if host == "many.test" else (host,))]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_an_origin_has_no_password() -> None:
    heard: list[Attempted | Ended] = []
    with ScriptedServer() as server, session(listeners=[heard.append]) as client:
        client.get(server.url.replace("://", "://user:secret@"))
        assert {event.origin for event in heard} == {server.url}


def test_sockets_are_closed() -> None:
    # A socket that is forgotten open warns when it is collected, and a warning is an error.
    script: list[Step] = [200, close, answer(200, {"Connection": "close"}, b"x"), hang, 200]
    with ScriptedServer(script) as server, no_wait(), session(RetryPolicy(per_try=0.1)) as client:
        for _ in range(3):
            client.put(server.url)
        assert len(server.requests) == 5
    gc.collect()


def test_a_stream_is_read_on_and_the_connection_goes_back() -> None:
    with ScriptedServer([503, answer(200, body=b"body" * 5000)]) as server, no_wait(), session() as client:
        for _ in range(2):
            with client.get(server.url, stream=True) as response:
                assert b"".join(response.iter_content(1000)) == b"body" * 5000
        assert server.connections == 1


def test_an_answer_that_was_read_because_it_failed_can_still_be_streamed() -> None:
    with ScriptedServer([answer(404, body=b"nothing here")]) as server, session() as client:
        response = client.get(server.url, stream=True)
        assert b"".join(response.iter_content(5)) == b"nothing here"


def test_forms_and_files_are_sent_again() -> None:
    with ScriptedServer([503, 200]) as server, no_wait(), session() as client:
        client.post(server.url, files={"file": io.BytesIO(b"content")}, data={"name": "value"})
        first, again = server.requests
        assert first.body == again.body
        assert b"content" in first.body


def test_redirects_are_calls_of_their_own() -> None:
    with ScriptedServer([503, answer(307, {"Location": "/other"}), 503, 201]) as server, no_wait():
        with session() as client:
            response = client.post(server.url, data=b"body")
        assert (response.status_code, len(report(response).attempts)) == (201, 2)
        assert len(report(response.history[0]).attempts) == 2
        assert {request.body for request in server.requests} == {b"body"}
        assert len({request.header("Idempotency-Key") for request in server.requests}) == 1


def test_retries_of_urllib3_beside_ours_are_refused() -> None:
    with pytest.raises(Misuse, match="max_retries"):
        RetryAdapter(max_retries=3)


def test_a_proxy_is_reached_through_limited_sockets_too() -> None:
    with ScriptedServer([hang]) as proxy, session(RetryPolicy(deadline=0.1)) as client:
        with pytest.raises(DeadlineExceeded):
            client.get("http://example.invalid/", proxies={"http": proxy.url})
        assert proxy.requests[0].target == "http://example.invalid/"
