"""gcloud against the emulator, with the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ...gcloud import RunGcloud

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed"),
]


def test_deploy_run_describe_list_cancel(served: Any, tmp_path: Path, run_gcloud: RunGcloud) -> None:
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": "test-project",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_WORKFLOWS_LOCATION": "europe-west4",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_WORKFLOWS": f"{served.url}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_WORKFLOWEXECUTIONS": f"{served.url}/",
    }

    def gcloud(*arguments: str) -> Any:
        done = run_gcloud(["workflows", *arguments, "--format=json"], environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    source = tmp_path / "flow.yaml"
    source.write_text("main:\n  params: [args]\n  steps:\n    - done:\n        return: ${args.n + 1}\n")
    gcloud("deploy", "flow", f"--source={source}", "--labels=team=search")
    done = gcloud("run", "flow", '--data={"n": 1}')
    assert (done["state"], done["result"]) == ("SUCCEEDED", "2")
    described = gcloud("executions", "describe", done["name"].rsplit("/", 1)[1], "--workflow=flow")
    assert described["name"] == done["name"]
    assert [e["name"] for e in gcloud("executions", "list", "flow")] == [done["name"]]
    workflow = served.deploy("sleeper", "- nap: {call: sys.sleep, args: {seconds: 600}}\n")
    record = served.call(lambda: served.engine.create_execution(workflow))
    assert gcloud("executions", "cancel", record.id, "--workflow=sleeper")["state"] == "CANCELLED"
