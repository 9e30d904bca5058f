"""The emulator refuses exactly the requests of tests/data/cloud_run_preview.yaml that need a launch stage."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import yaml

DATA = Path(__file__).resolve().parents[2] / "data" / "cloud_run_preview.yaml"
CASES = yaml.safe_load(DATA.read_text())["cases"]
LIMITS = {
    "nvidia-l4": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
    "nvidia-rtx-pro-6000": {"cpu": "20", "memory": "80Gi", "nvidia.com/gpu": "1"},
}


def resource_of(case: dict[str, Any], image: str) -> dict[str, Any]:
    """Return the job or the service of a case, with an accelerator and without a launch stage."""
    template: dict[str, Any] = {"timeout": "600s", "nodeSelector": {"accelerator": "nvidia-l4"}, **case["change"]}
    limits = LIMITS[template["nodeSelector"]["accelerator"]]
    template["containers"] = [{"image": image, "resources": {"limits": limits}}]
    if case["kind"] == "job":
        return {"template": {"template": template}}
    return {"template": {**template, "scaling": {"maxInstanceCount": 1}}}


def answer(cloud: Any, path: str, resource: dict[str, Any]) -> tuple[int, str]:
    """Return the HTTP status and Google's status of a create request."""
    try:
        cloud.call("POST", path, resource)
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())["error"]["status"]
    return 200, ""


@pytest.mark.parametrize("case", [case for case in CASES if "in memory" not in case["what"]], ids=lambda c: c["what"])
def test_a_preview_value_needs_its_launch_stage(cloud: Any, make: Any, case: dict[str, Any]) -> None:
    kind = case["kind"]
    image = f"{make.registry}/{'train-job' if kind == 'job' else 'serve-echo'}:latest"
    resource = resource_of(case, image)
    path = f"/v2/{make.parent}/{kind}s?{kind}Id="
    plain = answer(cloud, f"{path}a1", resource)
    assert plain == ((200, "") if case.get("available") else (400, "FAILED_PRECONDITION"))
    assert answer(cloud, f"{path}a2", {**resource, "launchStage": "BETA"}) == (200, "")
