"""`make fuzz` gives random inputs to the functions; here a few hundred of them, and a defect that it must find."""

from __future__ import annotations

from typing import Any

import pytest

from .__main__ import Fuzzer, main


def test_random_inputs_are_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "400", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert "400 inputs" in printed
    assert "0 problems" in printed


def test_an_unhandled_exception_and_a_wrong_execution_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzer = Fuzzer(0)

    def broken(event: Any) -> None:
        fuzzer._cloud.workflows.executions["e"] = None  # type: ignore[assignment]
        raise KeyError("message")

    monkeypatch.setattr(fuzzer._main, "on_spec_message", broken)
    fuzzer._message()
    assert ["KeyError" in problem for problem in fuzzer.problems] == [True, False]
    assert "started an execution" in fuzzer.problems[1]
