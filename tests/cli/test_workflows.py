"""`dropforge workflows lint` and `run`, with mocks and the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dropforge_cli.workflows import workflows

SOURCE = """
main:
  params: [args]
  steps:
    - init: {assign: [{r: null}]}
    - ask:
        try: {call: http.get, args: {url: "${args.url}"}, result: r}
        retry: ${http.default_retry}
    - week: {call: sys.sleep, args: {seconds: 604800}}
    - c: {call: events.create_callback_endpoint, result: c}
    - w: {call: events.await_callback, args: {callback: "${c}"}, result: told}
    - done: {return: ["${r.body.n}", "${told.http_request.body}", "${sys.get_env(\\"TEAM\\")}"]}
"""
MOCKS = """
- call: http.get
  where: {url: "https://*"}
  responses:
    - {code: 503, times: 2}
    - {body: {n: 1}, delay: 2}
- call: events.await_callback
  body: {ok: true}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "flow.yaml").write_text(SOURCE)
    (tmp_path / "mocks.yaml").write_text(MOCKS)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(workflows, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_run_with_mocks_under_the_virtual_clock(files: Path) -> None:
    code, out, err = invoke(
        "run", str(files / "flow.yaml"), "--clock", "virtual", "--mock", str(files / "mocks.yaml"),
        "--data", '{"url": "https://x"}', "--env", "TEAM=search",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out) == [1, {"ok": True}, "search"]
    assert "week (call)" in err
    assert "168.00h" in err
    assert "billed steps:" in err


def test_a_call_without_a_mock_fails_and_is_named(files: Path) -> None:
    code, out, err = invoke(
        "run",
        str(files / "flow.yaml"),
        "--clock",
        "virtual",
        "--mock",
        str(files / "mocks.yaml"),
        "--data",
        '{"url": "http://y"}',
    )
    assert (code, out) == (1, "")
    assert "no mock answers: http.get in step 'ask'" in err


def test_lint_prints_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("- a: {return: '${x}'}\n- b: {next: c}\n")
    code, _, err = invoke("lint", str(tmp_path / "bad.yaml"))
    assert code == 1
    assert "bad.yaml:1:15: error: in step a: error evaluating return value: symbol 'x'" in err
    assert "bad.yaml:2:13: error: in step b: 'next: c'" in err


def test_lint_accepts_the_deployed_workflow() -> None:
    code, out, err = invoke("lint", str(Path(__file__).parents[2] / "workflows" / "run.workflows.yaml"))
    assert code == 0, err
    assert out.endswith(": ok\n")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("5", "must be a list of rules"),
        ("- {step: x}", "must be a map with 'call'"),
        ("- {call: http.get, colour: 1}", "is not a response"),
        ("- {call: http.get, responses: [5]}", "a response must be a map"),
        ("- [", "mock file: "),
    ],
)
def test_a_wrong_mock_file_is_refused(files: Path, rules: str, message: str) -> None:
    (files / "mocks.yaml").write_text(rules)
    code, _, err = invoke("run", str(files / "flow.yaml"), "--mock", str(files / "mocks.yaml"))
    assert code == 1
    assert message in err


def test_bad_data_is_refused(files: Path) -> None:
    code, _, err = invoke("run", str(files / "flow.yaml"), "--data", "{")
    assert code == 2
    assert "is not JSON" in err
