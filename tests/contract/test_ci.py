"""docs/ci.md: its YAML is YAML, its commands are commands, and it drops specs where the deployment looks for them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import hcl2
import pytest
import yaml

from dropforge.base import names
from dropforge_cli.main import cli

from .configuration import ROOT, blocks, render, resources
from .gcloud import refused

PAGE = (ROOT / "docs" / "ci.md").read_text()
GITHUB, CLOUD_BUILD = (yaml.load(found, yaml.BaseLoader) for found in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))


def commands() -> list[str]:
    """Every line that a shell of CI runs."""
    scripts = [step.get("run", "") for job in GITHUB["jobs"].values() for step in job["steps"]]
    scripts += [step["args"][-1] for step in CLOUD_BUILD["steps"]]
    return [line for script in scripts for line in script.splitlines() if line]


def in_shell(start: str) -> Iterator[str]:
    return (line for line in commands() if line.startswith(start))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_accepts_what_ci_runs(tmp_path: Path) -> None:
    found = sorted(set(in_shell("gcloud ")))
    assert len(found) == 1, "both copy by the same command"
    assert refused(found, tmp_path) == {}


def test_dropforge_accepts_what_ci_runs() -> None:
    lines = list(in_shell("dropforge "))
    assert len(lines) == 2
    for line in lines:
        name, pattern = line.split()[1:]
        assert pattern == "jobs/*.json"
        example = str(ROOT / "examples" / "local" / "cloud_run.json")
        assert cli.commands[name].make_context(name, [example], parent=click.Context(cli))


def test_specs_are_checked_before_they_are_dropped() -> None:
    assert GITHUB["jobs"]["drop"]["needs"] == "validate"
    assert [step["id"] for step in CLOUD_BUILD["steps"]] == ["validate", "drop"]


def test_specs_go_where_they_start_runs_and_none_is_deleted() -> None:
    bucket = render(resources()["google_storage_bucket", "specs"]["name"], project_id="my-project", prefix="dropforge")
    for line in in_shell("gcloud "):
        assert f" gs://{bucket}/{names.SPECS_PREFIX.rstrip('/')} " in line
        assert "--checksums-only" in line, "by time, a checkout would be all new"
        assert "delete" not in line


def test_only_the_job_that_drops_gets_a_token() -> None:
    permissions: dict[str, Any] = {name: job["permissions"] for name, job in GITHUB["jobs"].items()}
    assert [name for name, held in permissions.items() if "id-token" in held] == ["drop"]
    assert GITHUB["jobs"]["drop"]["if"] == "github.event_name == 'push'"


def test_who_is_let_in_is_who_comes() -> None:
    found = re.search(r"```hcl\n(.*?)```", PAGE, re.S)
    assert found is not None
    (variable, (member,)) = next(item for item in hcl2.loads(found[1]).items() if not item[0].startswith("__"))
    assert (variable,) in blocks("variable")
    auth = next(step for step in GITHUB["jobs"]["drop"]["steps"] if "auth@" in step.get("uses", ""))
    provider = auth["with"]["workload_identity_provider"]
    assert member.strip('"').startswith(f"principalSet://iam.googleapis.com/{provider.partition('/providers/')[0]}/")
    assert "my-org/jobs" in member
    assert "assertion.repository=='my-org/jobs'" in PAGE
