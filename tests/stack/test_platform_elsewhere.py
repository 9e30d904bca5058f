"""A platform in a temporary folder passes all tests of the platforms of this repository.

Only DROPFORGE_PLATFORMS names the folder's module. The conformance tests are the tests of test_targets.py, unchanged.
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
    test_a_cancel_ends_a_training_run,
    test_a_deleted_training_resource_is_followed_by_another_attempt,
    test_a_permanent_failure_ends_the_run_at_once,
    test_a_preempted_attempt_is_followed_by_another,
    test_a_preempted_machine_is_replaced,
    test_a_served_run_answers_until_it_is_cancelled,
    test_a_train_only_run_succeeds_and_leaves_no_resource,
    test_an_attempt_killed_from_outside_is_followed_by_another,
    test_an_attempt_that_ran_out_of_memory_is_not_repeated,
    test_repeated_job_events_change_nothing,
    test_the_cloud_ends_an_attempt_at_its_deadline,
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
        return (resource._replace(kind="{KIND}") for resource in super().listed(*where))


class Services(CloudRunService):
    def resources(self, deployment):
        return [replace(resource, kind="elsewhere.example/Service") for resource in super().resources(deployment)]
'''


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the platform to a folder that this process and the functions' process import; yield the folder."""
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
    """Yield the state directory of a stack whose functions load the platform."""
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


def test_the_platform_needs_only_its_declaration(user: User) -> None:
    assert list(targets()) == ["cloud_run", "gke", "ray", "tpu_vm", "elsewhere"]
    assert "elsewhere" in servers()
    assert type(owner_of(KIND)).__name__ == "Jobs"
    assert "elsewhere" in json.dumps(job_spec_schema())


def test_a_wrong_field_of_the_platform_is_refused(user: User, target: dict[str, Any]) -> None:
    document = user.spec(target=target | {"flavour": "bitter"})
    with pytest.raises(InvalidSpec, match="/target/flavour"):
        parse_spec(json.dumps(document).encode())


def test_plan_and_preflight_support_the_platform(
    user: User, target: dict[str, Any], serve: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(user.spec(target=target, serve=serve, model={"source": "owner/tiny-1m"})))
    plan = CliRunner().invoke(cli, ["plan", str(path), "--json", "--state", str(user.state)])
    assert plan.exit_code == 0, plan.output
    [resource] = json.loads(plan.stdout)["placements"][0]["resources"]
    assert resource["kind"] == KIND
    preflight = CliRunner().invoke(cli, ["preflight", str(path), "--json", "--state", str(user.state)])
    findings = {finding["what"]: finding["status"] for finding in json.loads(preflight.stdout)}
    assert findings[f"spec {path}"] == "ok", preflight.output
    assert "quota for 1 nvidia-l4 in us-central1" in findings


def test_the_sweep_lists_the_resources_of_the_platform(user: User, target: dict[str, Any]) -> None:
    run = user.drop(user.spec("hang", target=target))
    user.wait(run, "TRAINING")
    name = user.training(run)
    listed, problems = list_all(here().cloud)
    assert [(resource.kind, resource.name) for resource in listed if resource.run == run] == [(KIND, name)]
    assert problems == []
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    assert user.wait(run).state is RunState.CANCELLED
    assert_clean(user, run)
