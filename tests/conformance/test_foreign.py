"""Servers of somebody else: one that owes nothing to taptwice, and ours without its runner."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from taptwice.conformance import language
from taptwice.conformance.cli import conformance
from taptwice.conformance.maps import read
from taptwice.conformance.routes import salted
from taptwice.errors import Misuse
from tests.conformance.charges import Charges, charges

ROUTES = {
    "payment": {
        "path": "/charges",
        "status": 200,
        "body": {"amount": "{amount}", "currency": "{currency}", "source": "tok_visa"},
    }
}
LOGINS = ("acct_a=Authorization: Bearer secret-a", "acct_b=Authorization: Bearer secret-b")


@pytest.fixture
def service() -> Iterator[Charges]:
    with charges() as server:
        yield server


def run(folder: Path, url: str, *options: str, routes: Any = ROUTES, answer: str = "") -> Any:
    """The command, and its report by case."""
    path, report = folder / "routes.json", folder / "report.json"
    path.write_text(json.dumps(routes))
    arguments = ["run", "--url", url, "--map", str(path), "--json", str(report)]
    result = CliRunner().invoke(conformance, [*arguments, *options], input=answer)
    found = {each["id"]: each for each in json.loads(report.read_text())} if report.exists() else {}
    return result, found


def logins(*callers: str) -> list[str]:
    return [part for caller in callers for part in ("--as", caller)]


# --- a server that owes nothing to taptwice


def test_what_http_alone_can_tell(service: Charges, tmp_path: Path) -> None:
    result, found = run(tmp_path, service.url, "--yes", *logins(*LOGINS))
    assert "cases can be run; they send" in result.output
    passed = {name for name, each in found.items() if each["status"] == "passed"}
    # Retries, other bodies, other accounts, five at once, a hundred keys at once.
    assert {"D-001", "D-041", "D-056", "D-098", "D-100", "D-112", "D-146", "D-159", "D-164"} <= passed
    assert "judged by its answers alone" in found["D-056"]["reason"]
    for name, reason in {
        "D-073": "no route for /script in the map",
        "D-148": "no --as for acct_a_token2",
        "D-180": "needs the command arm of the control interface",
        "D-225": "needs the command clock of the control interface",
        "D-144": "needs status_map",
        "D-065": "no {card} in the body of the map",
        "D-178": "for the store sqlite",
    }.items():
        assert found[name]["status"] == "skipped", found[name]
        assert reason in found[name]["reason"]
    # Another run finds its own keys unused.
    _, again = run(tmp_path, service.url, "--yes", "--only", "D-056", *logins(*LOGINS))
    assert again["D-056"]["status"] == "passed"


def test_it_finds_what_is_wrong(tmp_path: Path) -> None:
    with charges(fingerprint=False) as server:
        result, found = run(
            tmp_path, server.url, "--yes", "--only", "D-056", "--only", "D-098", *logins(*LOGINS)
        )
    assert result.exit_code == 1
    assert (found["D-056"]["status"], found["D-098"]["status"]) == ("passed", "failed")
    assert "first difference: r2: status: expected 422, found 200" in result.output
    assert "-> r2: POST /charges" in result.output


def test_it_asks_before_it_writes(service: Charges, tmp_path: Path) -> None:
    result, _ = run(tmp_path, service.url, "--only", "D-159", *logins(LOGINS[0]), answer="n\n")
    assert "1 of 1 cases can be run; they send 5 writes" in result.output
    assert (result.exit_code, service.charged) == (1, [])
    result, _ = run(tmp_path, service.url, "--only", "D-159", *logins(LOGINS[0]), answer="y\n")
    assert (result.exit_code, len(service.charged)) == (0, 1)


# --- ours, without its runner


OURS = {
    "payment": {"path": "/payments"},
    "payment_item": {"path": "/payments/{id}"},
    "script": {"path": "/script"},
    "settings": {"store": "sqlite"},
}
WITH_CONTROL = (
    "D-007",
    "D-056",
    "D-073",
    "D-144",
    "D-165",
    "D-189",
    "D-226",
    "D-237",
    "D-238",
    "D-246",
    "D-282",
)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ours_with_its_control_interface(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "taptwice", "conformance", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(": ")[1].strip()
            only = [part for name in (*WITH_CONTROL, "D-180", "D-281") for part in ("--only", name)]
            caller = "acct_a=Authorization: Bearer acct_a"
            result, found = run(tmp_path, url, "--yes", *only, *logins(caller), routes=OURS)
        finally:
            process.terminate()
    assert result.exit_code == 0, result.output
    assert {name for name, each in found.items() if each["status"] == "passed"} == set(WITH_CONTROL)
    assert found["D-056"]["reason"] == ""
    assert found["D-180"]["reason"] == "the runner cannot restart this server"


# --- the words of somebody else


@pytest.mark.parametrize(
    ("template", "request_", "sent"),
    [
        (
            {"amount": "{amount}", "source": "tok"},
            {"json": {"amount_cents": 5, "note": "x"}},
            {"json": {"amount": 5, "source": "tok", "note": "x"}},
        ),
        (
            {"data": {"value": "{amount}", "text": "pay {amount} {currency}"}},
            {"json": {"amount_cents": 5, "currency": "eur"}},
            {"json": {"data": {"value": 5, "text": "pay 5 eur"}}},
        ),
        ("amount={amount}&currency={currency}", {"json": {"amount_cents": 5, "currency": "eur"}},
         {"body": "amount=5&currency=eur"}),
        (
            {"amount": "{amount}", "source": "tok"},
            {"body": '{ "amount_cents":1.0}'},
            {"body": '{"source": "tok", "amount":1.0}'},
        ),
        (None, {"json": {"effect": 1}}, {"json": {"effect": 1}}),
    ],
)  # fmt: skip
def test_bodies(template: Any, request_: dict[str, Any], sent: dict[str, Any]) -> None:
    routes = read(json.dumps({"payment": {"path": "/c", "body": template}}))
    case = {"id": "X-1", "when": [{"send": {"id": "r1", **request_}}]}
    [parsed] = language.parse(json.dumps([case]))
    step = routes.translated(parsed, "").when[0]["send"]
    assert step == {"id": "r1", "path": "/c", "method": "POST", **sent}


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("k-1", "0000002ak-1"),
        ('"k-1"', '"0000002ak-1"'),
        ('"foo', '"0000002afoo'),
        ("42", "4242"),
        ("  ", "  "),
        ('"   "', '"   "'),
        ("a" * 255, "0000002a" + "a" * 247),
        ("123e4567-e89b-42d3-a456-426655440010", "123e4567-e89b-42d3-a456-42665544003a"),
        ("123E4567-E89B-42D3-A456-4266AAAAAA10", "123E4567-E89B-42D3-A456-4266AAAAAA3A"),
    ],
)
def test_new_keys_are_of_the_same_kind(key: str, new: str) -> None:
    assert salted(key, "0000002a") == new


@pytest.mark.parametrize(
    ("path", "request_", "sent"),
    [
        ("/p?a={amount}&c={currency}", {"json": {"amount_cents": 5, "currency": "e r"}}, "/p?a=5&c=e%20r"),
        ("/pay?a={amount}", {"path": "/payments?b=2&c", "json": {"amount_cents": 5}}, "/pay?a=5&b=2&c"),
        ("/pay?amount={amount}&v=1", {"json": {}}, "/pay?v=1"),
        ("/pay?amount={amount}", {}, "/pay"),
        ("/pay/{amount}", {"json": {"amount_cents": 5}}, "/pay/5"),
        ("/pay", {"path": "/payments?"}, "/pay?"),
    ],
)  # fmt: skip
def test_paths(path: str, request_: dict[str, Any], sent: str) -> None:
    routes = read(json.dumps({"payment": {"path": path}}))
    case = {"id": "X-1", "when": [{"send": {"id": "r1", **request_}}]}
    [parsed] = language.parse(json.dumps([case]))
    assert routes.translated(parsed, "").when[0]["send"]["path"] == sent


def test_a_member_that_the_cases_send_only_as_text_may_be_named() -> None:
    assert read('{"payment": {"path": "/c", "body": {"more": "{meta}"}}}').named["payment"].path == "/c"


def test_what_a_body_lacks_is_named_as_it_is_put_there() -> None:
    routes = read(json.dumps({"payment": {"path": "/c", "body": "fixed"}}))
    case = {"id": "X-1", "when": [{"send": {"id": "r1", "json": {"amount_cents": 5, "currency": "eur"}}}]}
    [parsed] = language.parse(json.dumps([case]))
    assert list(routes.missing(parsed, fresh=False)) == ["put {amount}, {currency} into body"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "cannot read the map"),
        ("[]", "the map is not an object of routes"),
        ("{}", "the map is not an object of routes"),
        ('{"refund": {"path": "/r"}}', "the map names refund; there are payment"),
        ('{"payment": {"pth": "/r"}}', "the map's payment has no pth; there are path, method, body, status"),
        ('{"payment": "/r"}', "the map's payment is not an object with a path"),
        ('{"payment": {}}', "the map's payment has no path"),
        ('{"payment": {"path": "r"}}', 'payment: path is "r"; it must be a path that begins with /'),
        ('{"payment": {"path": "/r", "status": "abc"}}', 'payment: status is "abc"; it must be a status'),
        ('{"payment": {"path": "/r", "method": 5}}', "payment: method is 5"),
        ('{"payment": {"path": "/r", "body": [1]}}', r"payment: body is \[1\]"),
        ('{"payment": {"path": "/r", "body": {"a": "{amuont}"}}}', "no {amuont} for its body; there are {a"),
        ('{"payment": {"path": "/r?{amuont}"}}', "the cases have no {amuont} for its path"),
        ('{"settings": 5}', "the map's settings are not an object"),
        ('{"settings": {"in_fligth": "wait"}}', "in_fligth among its settings.*did you mean in_flight?"),
        ('{"settings": {"in_flight": "perhaps"}}', 'settings: in_flight cannot be "perhaps"'),
    ],
)  # fmt: skip
def test_maps_that_say_nothing(text: str, complaint: str) -> None:
    with pytest.raises(Misuse, match=complaint):
        read(text)


def test_the_options_belong_together() -> None:
    result = CliRunner().invoke(conformance, ["run", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "--url, --map and --as belong together" in result.output


def test_callers_that_no_case_has(service: Charges, tmp_path: Path) -> None:
    result, _ = run(tmp_path, service.url, "--yes", "--as", "nobody=Authorization: x")
    assert result.exit_code == 2
    assert "--as nobody: no case has this caller; there are acct_a, " in result.output


def test_an_address_where_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    result, found = run(tmp_path, f"http://127.0.0.1:{port}", "--yes", *logins(LOGINS[0]))
    assert (result.exit_code, found) == (2, {})
    assert f"cannot reach http://127.0.0.1:{port}: " in result.output
