"""One word for each stage, in main.py, stages/, the workflow and the log: a grep for the word shows the whole stage."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge_local.stack import deployment
from dropforge_local.stack.functions_host import entry_points

from .configuration import ROOT, TERRAFORM

FUNCTIONS = ROOT / "functions"
WORKFLOWS = sorted((ROOT / "workflows").glob("*.workflows.yaml"))
# Both have `main`, which calls no function, and the same `call_function` and `may_pass` (test_rollout_workflow.py).
STEPS: dict[str, Any] = {name: body for path in WORKFLOWS for name, body in yaml.safe_load(path.read_text()).items()}
# `await` is a keyword of Python, so its module has another name: await_.
WORDS = {
    path.stem.rstrip("_") for path in (FUNCTIONS / "dropforge" / "stages").iterdir() if not path.stem.startswith("__")
} | {"notify"}  # no function of its own: every stage notifies through the package tell
# The containers of a run call this function.
OF_CONTAINERS = {"access"}
# The console calls these functions.
OF_THE_CONSOLE = {"ask", "preflight"}


def called_functions() -> dict[str, str]:
    """Every function that the workflow calls, and the subworkflow that calls the function."""
    return {call["name"]: name for name, body in STEPS.items() for call in _calls_of_functions(body)}


def _calls_of_functions(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("call") == "call_function":
            yield node["args"]
        for value in node.values():
            yield from _calls_of_functions(value)
    elif isinstance(node, list):
        for item in node:
            yield from _calls_of_functions(item)


def words_of_entry_points() -> dict[str, list[str]]:
    """The stages that each entry point of main.py passes to the functions that it calls."""
    functions = ast.parse((FUNCTIONS / "main.py").read_text()).body
    named = {function.name: _stages(function) for function in functions if isinstance(function, ast.FunctionDef)}
    return {name: named[name] for name in entry_points()}


def _stages(function: ast.FunctionDef) -> list[str]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    values = [argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)]
    return [value for value in values if isinstance(value, str) and value in WORDS]


def logged_words() -> set[str]:
    """The values of the field `stage` of every log line that names a stage itself."""
    trees = [ast.parse(path.read_text()) for path in FUNCTIONS.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    fields = [field.value for call in calls for field in call.keywords if field.arg == "stage"]
    return {str(field.value) for field in fields if isinstance(field, ast.Constant)}


def test_every_entry_point_is_triggered_called_or_scheduled() -> None:
    triggered = list(dict.fromkeys(trigger.function for trigger in deployment.triggers()))
    scheduled = re.findall(r'function\["(\w+)"\]\.service_config', (TERRAFORM / "scheduler.tf").read_text())
    assert entry_points()[: len(triggered)] == triggered
    assert entry_points()[-1:] == list(dict.fromkeys(scheduled))
    assert sorted(entry_points()) == sorted(
        [*triggered, *called_functions(), *OF_CONTAINERS, *OF_THE_CONSOLE, *set(scheduled)]
    )


def test_every_entry_point_names_one_stage() -> None:
    words = words_of_entry_points()
    assert [name for name, stages in words.items() if len(stages) != 1] == []
    assert words["on_job_event"] == words["inspect"] == ["await"]


def test_a_subworkflow_begins_with_the_word_of_the_stage_that_it_calls() -> None:
    words = words_of_entry_points()
    assert called_functions().keys() == {"provision", "inspect", "deploy", "teardown", "rollout"}
    wrong = {name: caller for name, caller in called_functions().items() if [caller.partition("_")[0]] != words[name]}
    assert wrong == {}


def test_log_lines_use_the_words_of_the_stages() -> None:
    assert logged_words() <= WORDS
    assert {word for stages in words_of_entry_points().values() for word in stages} <= logged_words()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_keeps_the_limits_of_cloud_workflows(path: Path) -> None:
    """https://cloud.google.com/workflows/quotas: 128 KB of source, 400 characters in an expression."""
    text = path.read_text()
    assert len(text.encode()) <= 128 * 1024
    expressions = re.findall(r"\$\{[^}]*\}", text)
    assert len(expressions) > 10
    assert [expression for expression in expressions if len(expression) > 400] == []


def test_no_step_is_named_like_a_boolean_of_yaml_1_1() -> None:
    assert [key for key in _keys(STEPS) if not isinstance(key, str)] == []
    assert [key for key in _keys(yaml.safe_load("steps: [{on: {call: a}}]")) if not isinstance(key, str)] == [True]


def _keys(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node, *(key for value in node.values() for key in _keys(value))]
    return [key for item in node for key in _keys(item)] if isinstance(node, list) else []
