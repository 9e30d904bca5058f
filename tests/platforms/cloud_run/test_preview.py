"""Values of Cloud Run's requests that are in Preview, and the other limits of its requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.base.errors import InvalidSpec
from dropforge.money.plan import make_plan
from dropforge.platforms.cloud_run.catalog import PREVIEWS
from dropforge.platforms.cloud_run.preview import preview_values, with_launch_stage
from dropforge.platforms.cloud_run.serve import service_request
from dropforge.platforms.cloud_run.train import CloudRunJobs, job_request
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Launch
from dropforge.spec import JobSpec, parse_spec
from dropforge_cli.deployment import placeholders

from ...deployments import settings_with

ROOT = Path(__file__).resolve().parents[3]
CASES = yaml.safe_load((ROOT / "tests" / "data" / "cloud_run_preview.yaml").read_text())["cases"]
NOW = datetime(2026, 11, 23, tzinfo=UTC)
RTX = {"type": "cloud_run", "accelerator": "nvidia-rtx-pro-6000", "cpu": 20, "memory_gib": 80}


def spec_of(**changes: Any) -> JobSpec:
    document = json.loads((ROOT / "examples" / "cloud-run-gemma-2b-qlora.json").read_text())
    return parse_spec(json.dumps({**document, **changes}).encode())


def launch(seconds: int = 7200, **changes: Any) -> Launch:
    return Launch("run-1", 1, 0, spec_of(**changes), settings_with(), NOW, seconds, key="")


def job(seconds: int = 7200, **changes: Any) -> dict[str, Any]:
    return dict(job_request(launch(seconds, **changes))["job"])


def service(**changes: Any) -> dict[str, Any]:
    return dict(service_request(Deployment("run-1", spec_of(**changes), settings_with(), NOW))["service"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_the_check_finds_what_googles_pages_call_preview(case: dict[str, Any]) -> None:
    task = {"timeout": "600s", "nodeSelector": {"accelerator": "nvidia-l4"}, **case["change"]}
    request = {"template": {"template": task}} if case["kind"] == "job" else {"template": task}
    found = list(preview_values(request))
    assert len(found) == (0 if case.get("available") else 1)
    assert set(found) <= set(PREVIEWS)
    assert ("launchStage" in with_launch_stage(request)) is bool(found)


def test_a_long_gpu_task_names_its_launch_stage() -> None:
    """The README's example runs for two hours."""
    assert job(7200)["launchStage"] == "BETA"
    assert "launchStage" not in job(3600)


def test_a_long_gpu_task_has_the_stage_in_dropforges_own_request() -> None:
    target = {**RTX, "placements": [{"region": "us-central1"}]}
    assert job(60, target=target)["launchStage"] == "BETA"
    assert service(serve=RTX)["launchStage"] == "BETA"
    assert "launchStage" not in service()


SPECS = [*(ROOT / "examples").rglob("*.json"), *(ROOT / "functions" / "dropforge" / "platforms").glob("*/smoke.json")]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_request_of_every_example_names_the_stage_that_its_values_need(path: Path) -> None:
    plan = make_plan(parse_spec(path.read_bytes()), placeholders(), path.name)
    resources = [resource for placement in plan.placements for resource in placement.resources]
    resources += plan.endpoint.resources if plan.endpoint else []
    for resource in resources:
        if resource.kind.startswith("run.googleapis.com/"):
            request = resource.request["job" if resource.kind.endswith("/Job") else "service"]
            assert (request.get("launchStage") == "BETA") is any(preview_values(request)), resource.name


@pytest.mark.parametrize(("timeout", "failures"), [("1s", 1), ("20m", 240), ("30m", 360)])
def test_the_startup_probe_never_takes_longer_than_cloud_run_allows(timeout: str, failures: int) -> None:
    made = service(serve={"type": "cloud_run", "startup_timeout": timeout})
    probe = made["template"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] == failures
    assert probe["failureThreshold"] * probe["periodSeconds"] <= 1800


@pytest.mark.parametrize("timeout", ["1801s", "31m", "45m", "1h"])
def test_a_longer_startup_is_refused_before_the_training_is_paid(timeout: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        spec_of(serve={"type": "cloud_run", "startup_timeout": timeout})
    [problem] = refusal.value.problems
    assert (problem.pointer, problem.found) == ("/serve/startup_timeout", f'"{timeout}"')
    assert str(problem.expected).startswith("at most 30m")


def test_a_disk_holds_the_files_of_the_training_and_not_its_memory() -> None:
    target = {"type": "cloud_run", "disk_gib": 50, "placements": [{"region": "us-central1"}]}
    made = job(60, target=target, limits={})
    task = made["template"]["template"]
    assert made["launchStage"] == "BETA"
    assert task["volumes"] == [{"name": "work", "emptyDir": {"medium": "DISK", "sizeLimit": "50Gi"}}]
    (container,) = task["containers"]
    assert container["volumeMounts"] == [{"name": "work", "mountPath": "/work"}]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (variables["TMPDIR"], variables["HF_HOME"]) == ("/work", "/work/huggingface")


def test_the_price_of_a_disk_is_unknown_and_not_zero() -> None:
    target = {"type": "cloud_run", "disk_gib": 50, "placements": [{"region": "us-central1"}]}
    price = CloudRunJobs().price(spec_of(target=target, limits={}), 0)
    assert price.usd_per_hour is None
    assert "ephemeral disk in us-central1" in price.source
