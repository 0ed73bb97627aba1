"""What `taptwice conformance` says of wrong usage, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from taptwice.conformance import language, needed
from taptwice.conformance.cli import conformance

OWN = Path(language.__file__).with_name("cases.json")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(conformance, arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("run", "--app", "django"), "no application 'django': choose of fastapi"),
        (("run", "--driver", "nope"), "fastapi on sqlite has no driver 'nope': choose of"),
        (("run", "--client", "curl"), "no client 'curl': choose of httpx2"),
        (("run", "--only", "D-999"), "no case D-999"),
        (("explain", "D-999"), "no case D-999"),
        (
            ("run", "--json", "/no/such/folder/x.json"),
            "--json /no/such/folder/x.json: there is no such folder",
        ),
        (("run", "--cases", "{bad}"), "cannot read the cases of"),
        (("run", "--url", "http://127.0.0.1:9", "--map", "{bad}"), "cannot read the map"),
        (("run", "--url", "http://127.0.0.1:9", "--map", "{bad}", "--app", "flask"), "not for --url"),
        (("run", "--url", "http://127.0.0.1:9"), "--url, --map and --as belong together"),
        (("serve", "--app", "django"), "no application 'django'"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[1,")
    result = invoke(*(each.replace("{bad}", str(bad)) for each in arguments))
    assert complaint in result.output
    assert result.exit_code == 2
    assert result.output.count("\n") <= 4


def test_ids_are_found_in_small_letters() -> None:
    result = invoke("explain", "d-098")
    assert result.exit_code == 0
    assert result.output.startswith("D-098")


@pytest.mark.slow
def test_a_run_that_only_skips_proves_nothing() -> None:
    result = invoke("run", "--only", "d-264")
    assert result.exit_code == 2
    assert "every case was skipped: nothing is proven" in result.output


@pytest.mark.parametrize(
    ("arguments", "module", "line"),
    [
        ((), "python_multipart", "pip install 'taptwice[conformance]'"),
        (("--app", "flask"), "flask", "pip install 'taptwice[flask]'"),
        (("--store", "postgresql"), "psycopg", "pip install 'taptwice[postgres]'"),
        (("--client", "requests"), "requests", "pip install 'taptwice[requests]'"),
    ],
)
def test_what_is_missing_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], module: str, line: str
) -> None:
    found = importlib.util.find_spec
    name = f"{needed.__name__}.find_spec"
    monkeypatch.setattr(name, lambda name: None if name == module else found(name))
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert f"needs {module}, which is not installed: {line}" in result.output
    assert "ok" not in result.output


@pytest.mark.slow
def test_a_server_that_does_not_start_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = invoke("run", "--only", "D-001", "--only", "D-002")
    assert result.exit_code == 2
    assert "the server process did not start" in result.output
    assert "D-001" not in result.output


def test_a_postgresql_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    server = f"postgresql://127.0.0.1:{port}/x"
    result = invoke("run", "--store", "postgresql", "--server", server, "--only", "D-001")
    assert result.exit_code == 2
    assert "Error: --server: connection failed" in result.output


@pytest.mark.slow
def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "taptwice", "conformance", "serve", "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on port {port}" in ended.stderr
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_report_of_a_failed_case(tmp_path: Path) -> None:
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"id": "X-1", "sut": "client", "when": [{"dance": 1}]}]))
    result = invoke("run", "--cases", str(cases), "--only", "x-1")
    assert result.exit_code == 1
    assert "X-1     FAILED" in result.output


SENT = {"send": {"id": "r1"}}


@pytest.mark.parametrize(
    "case",
    [
        {"then": []},
        {"then": 5},
        {"when": "x"},
        {"when": [5]},
        {"when": 5},
        {"given": []},
        {"when": [{"send": 5}]},
        {"when": [{"send": {}}]},
        {"when": [{"parallel": 5}]},
        {"when": [{"parallel": {"n": 2, "req": 5, "prefix": "p"}}]},
        {"when": [{"parallel": {"req": {}, "prefix": "p"}}]},
        {"when": [{"parallel": {"list": [{"send": [1]}]}}]},
        {"when": [{"duplicate_all": {"reqs": 5}}]},
        {"when": [{"duplicate_all": {}}]},
        {"when": [{"reached": 5}]},
        {"when": [SENT], "then": {"responses": 5}},
        {"when": [SENT], "then": {"responses": {"r1": 5}}},
        {"when": [SENT], "then": {"responses": {"r1": {"headers": 5}}}},
        {"when": [SENT], "then": {"group": 5}},
        {"when": [SENT], "then": {"groups": {}}},
        {"when": [SENT], "then": {"effects": []}},
        {"group": []},
        {"modes": 5},
        {"sut": "client", "when": [{"server_script": 5}]},
        {"sut": "client", "when": [{"server_script": [5]}]},
        {"sut": "client", "when": [{"client_call": 5}]},
        {"sut": "client", "then": {"result": 5}},
        {"sut": "client", "then": {"client": 5}},
    ],
    ids=json.dumps,
)
def test_what_is_not_well_formed_ends_itself(tmp_path: Path, case: dict[str, Any]) -> None:
    [parsed] = language.parse(json.dumps([{"id": "X-1", **case}]))
    assert parsed.strange
    assert not any("Error" in word for word in parsed.strange)


@pytest.mark.slow
def test_the_run_goes_on_after_it(tmp_path: Path) -> None:
    good = next(case for case in json.loads(OWN.read_text("utf-8")) if case["id"] == "D-001")
    cases = tmp_path / "cases.json"
    cases.write_text(
        json.dumps([{"id": "X-1", "when": [5]}, {"id": "X-2", "when": [{"client_call": 5}]}, good])
    )
    result = invoke("run", "--cases", str(cases))
    assert result.exit_code == 1
    assert "X-1     FAILED" in result.output
    assert "X-2     FAILED" in result.output
    assert "first difference: not in the language: when: 5 is not an object" in result.output
    assert "D-001   ok" in result.output
