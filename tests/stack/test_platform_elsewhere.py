"""A platform that lives in a temporary folder passes everything that holds for the platforms of this repository.

Only DROPFORGE_PLATFORMS names the folder's module. The conformance cases are those of test_targets.py, unchanged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from dropforge.base.errors import InvalidSpec
from dropforge.platforms import owner_of, servers, targets
from dropforge.run.record import RunState
from dropforge.spec import job_spec_schema, parse_spec, registry
from dropforge.spec.parse import forget_platforms
from dropforge.stages.sweep.orphans import list_all
from dropforge_cli.main import cli
from dropforge_local.stack import control as local

from ..deployments import here
from .conftest import NOOP_CONFIG, RARE_SWEEP_SECONDS, User, user_of
from .test_runs import assert_clean
from .test_targets import (  # noqa: F401  # pytest collects these cases here, with the fixtures of this module
    test_a_failure_that_cannot_be_mended_ends_the_run_at_once,
    test_a_kill_from_outside_is_tried_again,
    test_a_machine_that_is_taken_away_is_replaced,
    test_a_preempted_attempt_is_followed_by_another,
    test_a_served_run_answers_until_it_is_cancelled,
    test_a_train_only_run_succeeds_and_leaves_nothing,
    test_an_attempt_that_ran_out_of_memory_is_not_repeated,
    test_cancel_ends_a_running_run,
    test_every_event_thrice_changes_nothing,
    test_the_cloud_itself_ends_an_attempt_at_its_deadline,
    test_what_is_deleted_by_hand_is_made_again,
)

KIND = "elsewhere.example/Job"
PLACEMENTS = [{"region": "us-central1"}, {"region": "europe-west4"}]
INIT = f'''
from dropforge.platforms.platform import Platform, Serving, Training

from .spec import ElsewhereServe, ElsewhereTarget

PLATFORM = Platform(
    name="elsewhere",
    training=Training(ElsewhereTarget, "elsewhere.adapters:Jobs", kinds=("{KIND}",), needs=("train_trl_image",)),
    serving=(Serving(ElsewhereServe, "elsewhere.adapters:Services", kinds=("elsewhere.example/Service",)),),
    services=("elsewhere",),
)
'''
SPEC = """
from typing import Literal

from dropforge.platforms.cloud_run.spec import CloudRunServe, CloudRunTarget


class ElsewhereTarget(CloudRunTarget):
    type: Literal["elsewhere"]
    flavour: Literal["sweet", "sour"] = "sweet"


class ElsewhereServe(CloudRunServe):
    type: Literal["elsewhere"]
"""
ADAPTERS = f'''
from dataclasses import replace

from dropforge.platforms.cloud_run.serve import CloudRunService
from dropforge.platforms.cloud_run.train import CloudRunJobs


class Jobs(CloudRunJobs):
    def resources(self, launch):
        return [replace(resource, kind="{KIND}") for resource in super().resources(launch)]

    def listed(self, *where):
        return (found._replace(kind="{KIND}") for found in super().listed(*where))


class Services(CloudRunService):
    def resources(self, deployment):
        return [replace(one, kind="elsewhere.example/Service") for one in super().resources(deployment)]
'''


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The platform's folder, which this process and the functions' process import."""
    folder = tmp_path_factory.mktemp("platforms")
    package = folder / "elsewhere"
    package.mkdir()
    smoke = Path(str(registry.__file__)).parents[1] / "platforms" / "cloud_run" / "smoke.json"
    template = smoke.read_text().replace('"type": "cloud_run"', '"type": "elsewhere"')
    files = {"__init__.py": INIT, "spec.py": SPEC, "adapters.py": ADAPTERS, "smoke.json": template}
    for name, text in files.items():
        (package / name).write_text(text)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        patch.dict(os.environ, {registry.VARIABLE: "elsewhere=elsewhere", "PYTHONPATH": path}),
        patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        forget_platforms()
        yield folder
    forget_platforms()
    for module in [name for name in sys.modules if name.partition(".")[0] == "elsewhere"]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def shared_stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack whose functions know the platform."""
    state = tmp_path_factory.mktemp("stack")
    replace(NOOP_CONFIG, sweep_seconds=RARE_SWEEP_SECONDS).save(state)
    local.up(state)
    yield state
    local.down(state)


@pytest.fixture
def user(shared_stack: Path) -> Iterator[User]:
    with patch.dict(os.environ):
        yield user_of(shared_stack)


@pytest.fixture
def target() -> dict[str, Any]:
    return {"type": "elsewhere", "flavour": "sour", "placements": PLACEMENTS}


@pytest.fixture
def serve() -> dict[str, Any]:
    return {"type": "elsewhere", "ttl": "1h"}


def test_the_declaration_is_all_that_others_read(user: User) -> None:
    assert list(targets()) == ["cloud_run", "gke", "ray", "tpu_vm", "elsewhere"]
    assert "elsewhere" in servers()
    assert type(owner_of(KIND)).__name__ == "Jobs"
    assert "elsewhere" in json.dumps(job_spec_schema())


def test_a_field_of_the_platform_is_checked(user: User, target: dict[str, Any]) -> None:
    document = user.spec(target=target | {"flavour": "bitter"})
    with pytest.raises(InvalidSpec, match="/target/flavour"):
        parse_spec(json.dumps(document).encode())


def test_plan_and_preflight_know_the_platform(
    user: User, target: dict[str, Any], serve: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(user.spec(target=target, serve=serve, model={"source": "owner/tiny-1m"})))
    plan = CliRunner().invoke(cli, ["plan", str(path), "--json", "--state", str(user.state)])
    assert plan.exit_code == 0, plan.output
    [resource] = json.loads(plan.stdout)["placements"][0]["resources"]
    assert resource["kind"] == KIND
    preflight = CliRunner().invoke(cli, ["preflight", str(path), "--json", "--state", str(user.state)])
    findings = {found["what"]: found["status"] for found in json.loads(preflight.stdout)}
    assert findings["spec job.json"] == "ok", preflight.output
    assert "quota for 1 nvidia-l4 in us-central1" in findings


def test_the_sweep_deletes_what_no_run_owns(user: User, target: dict[str, Any]) -> None:
    run = user.drop(user.spec("hang", target=target))
    user.wait(run, "TRAINING")
    name = user.training(run)
    found, problems = list_all(here().cloud)
    assert [(one.kind, one.name) for one in found if one.run == run] == [(KIND, name)]
    assert problems == []
    user.publish("dropforge-requests", json.dumps({"cancel": run}).encode())
    assert user.wait(run).state is RunState.CANCELLED
    assert_clean(user, run)
