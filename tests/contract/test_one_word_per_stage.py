"""The same word in the entry point, the workflow step, and the triggers: one grep shows a whole stage."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from dropforge_local.stack.functions_host import entry_points

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / "workflows" / "run.workflows.yaml").read_text()


def test_every_function_that_the_workflow_calls_is_an_entry_point() -> None:
    called = set(re.findall(r"\{name: (\w+), body", WORKFLOW)) | set(re.findall(r"name: (\w+)\n\s+body:", WORKFLOW))
    assert called == {"provision", "inspect", "deploy", "teardown", "notify"}
    assert called <= set(entry_points())


def test_every_entry_point_is_called_or_triggered() -> None:
    triggered = {"on_spec_uploaded", "on_spec_deleted", "on_spec_message", "on_job_event", "sweep"}
    called = {"provision", "inspect", "deploy", "teardown", "notify"}
    assert set(entry_points()) == triggered | called


def test_entry_points_follow_the_flow() -> None:
    assert entry_points() == [
        "on_spec_uploaded", "on_spec_deleted", "on_spec_message", "on_job_event",
        "provision", "inspect", "deploy", "notify", "teardown", "sweep",
    ]  # fmt: skip


def test_the_workflow_keeps_the_service_s_limits() -> None:
    assert len(WORKFLOW.encode()) <= 128 * 1024
    for expression in re.findall(r"\$\{[^}]*\}", WORKFLOW):
        assert len(expression) <= 400


def test_no_step_is_called_like_a_yaml_1_1_boolean() -> None:
    def names(node: object) -> list[object]:
        if isinstance(node, dict):
            return [*node, *(n for value in node.values() for n in names(value))]
        return [n for item in node for n in names(item)] if isinstance(node, list) else []

    assert all(isinstance(name, str) for name in names(yaml.safe_load(WORKFLOW)))
