"""docs/ci.md: its YAML parses, its commands exist, and it uploads specs to the deployment's specs bucket."""

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

from ..gcloud import RunGcloud
from .configuration import ROOT, blocks, render, resources
from .gcloud import refused

PAGE = (ROOT / "docs" / "ci.md").read_text()
GITHUB, CLOUD_BUILD = (yaml.load(block, yaml.BaseLoader) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))


def commands() -> list[str]:
    """Return every shell command that CI runs."""
    scripts = [step.get("run", "") for job in GITHUB["jobs"].values() for step in job["steps"]]
    scripts += [step["args"][-1] for step in CLOUD_BUILD["steps"]]
    return [line for script in scripts for line in script.splitlines() if line]


def commands_starting_with(start: str) -> Iterator[str]:
    return (line for line in commands() if line.startswith(start))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_accepts_the_commands_of_ci(tmp_path: Path, run_gcloud: RunGcloud) -> None:
    copying = sorted(set(commands_starting_with("gcloud ")))
    assert len(copying) == 1, "GitHub and Cloud Build use the same command"
    assert refused(run_gcloud, copying, tmp_path) == {}


def test_dropforge_accepts_the_commands_of_ci() -> None:
    lines = list(commands_starting_with("dropforge "))
    assert len(lines) == 2
    for line in lines:
        name, pattern = line.split()[1:]
        assert pattern == "jobs/*.json"
        example = str(ROOT / "examples" / "local" / "cloud_run.json")
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.make_context(name, [example], parent=click.Context(cli))


def test_specs_are_validated_before_they_are_dropped() -> None:
    assert GITHUB["jobs"]["drop"]["needs"] == "validate"
    assert [step["id"] for step in CLOUD_BUILD["steps"]] == ["validate", "drop"]


def test_specs_are_copied_to_the_specs_bucket_and_never_deleted() -> None:
    bucket = render(resources()["google_storage_bucket", "specs"]["name"], project_id="my-project", prefix="dropforge")
    for line in commands_starting_with("gcloud "):
        assert f" gs://{bucket}/{names.SPECS_PREFIX.rstrip('/')} " in line
        assert "--checksums-only" in line, "a checkout gives every file a new time"
        assert "delete" not in line


def test_only_the_job_that_drops_gets_a_token() -> None:
    permissions: dict[str, Any] = {name: job["permissions"] for name, job in GITHUB["jobs"].items()}
    assert [name for name, held in permissions.items() if "id-token" in held] == ["drop"]
    assert GITHUB["jobs"]["drop"]["if"] == "github.event_name == 'push'"


def test_the_workload_identity_that_is_admitted_is_the_one_that_ci_uses() -> None:
    block = re.search(r"```hcl\n(.*?)```", PAGE, re.S)
    assert block is not None
    (variable, (member,)) = next(item for item in hcl2.loads(block[1]).items() if not item[0].startswith("__"))
    assert (variable,) in blocks("variable")
    auth = next(step for step in GITHUB["jobs"]["drop"]["steps"] if "auth@" in step.get("uses", ""))
    provider = auth["with"]["workload_identity_provider"]
    assert member.strip('"').startswith(f"principalSet://iam.googleapis.com/{provider.partition('/providers/')[0]}/")
    assert "my-org/jobs" in member
    assert "assertion.repository=='my-org/jobs'" in PAGE
