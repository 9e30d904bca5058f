"""docs/operations.md, docs/security.md and docs/deploy.md are complete and correct."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import hcl2
import pytest

from dropforge.base.errors import ErrorClass
from dropforge.spec import Limits
from dropforge.stages.retries import retries

from ..gcloud import RunGcloud
from .configuration import ROOT, blocks, local
from .gcloud import refused

PAGES = sorted((ROOT / "docs").glob("*.md"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DEPLOY = (ROOT / "docs" / "deploy.md").read_text()


def test_every_alert_has_instructions() -> None:
    headings = re.findall(r"^### (.*)$", OPERATIONS, re.M)
    assert {name for heading in headings for name in re.findall(r"`(\w+)`", heading)} == set(local("alerts"))


def test_the_alert_no_sweep_counts_the_last_log_line_of_a_sweep() -> None:
    logged = re.search(r'message=\\?"(\w+)', local("log_metrics")["sweeps"]["filter"])
    assert logged is not None
    assert (
        f'log("{logged[1]}", stage="sweep"'
        in (ROOT / "functions" / "dropforge" / "stages" / "sweep" / "sweep.py").read_text()
    )
    assert [name for name, alert in local("alerts").items() if "at_least" in alert] == ["no_sweep"]


def test_the_table_of_error_classes_tells_what_the_default_limits_do() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (yes|no) \| (.+) \|$", OPERATIONS, re.M)
    described = {name: (again == "yes", elsewhere == "yes") for name, again, elsewhere, _ in rows}
    assert described == {str(name): (retries(Limits(), name) > 0, name.moves_on) for name in ErrorClass}


def test_the_table_of_permissions_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tools" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_settings_that_deploy_md_shows_are_variables() -> None:
    block = re.search(r"```hcl\n(.*?)```", DEPLOY, re.S)
    assert block is not None
    assert {(name,) for name in hcl2.loads(block[1]) if not name.startswith("__")} <= set(blocks("variable"))


def test_every_file_of_terraform_is_described() -> None:
    described = set(re.findall(r"\.\./terraform/(\w+\.tf)\)", DEPLOY))
    not_made = {"outputs.tf", "versions.tf"}
    assert described == {path.name for path in (ROOT / "terraform").glob("*.tf")} - not_made


@pytest.mark.parametrize("page", ["deploy", "security", "operations", "upgrade"])
def test_pages_state_that_google_cloud_was_not_tried(page: str) -> None:
    assert "**Not yet run on Google Cloud" in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_accepts_every_command_of_the_documents(tmp_path: Path, run_gcloud: RunGcloud) -> None:
    commands = [line for page in PAGES for line in re.findall(r"^ *\$ (gcloud .*)$", page.read_text(), re.M)]
    assert len(commands) >= 10
    assert refused(run_gcloud, commands, tmp_path) == {}
