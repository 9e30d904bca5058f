"""The values of a Cloud Run request that are in Preview, and the launch stage that such a request needs.

https://docs.cloud.google.com/run/docs/reference/rest/v2/projects.locations.jobs (`launchStage`: without a value Cloud
Run assumes GA and refuses preview features). PREVIEWS in catalog.py has the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .catalog import GPU_TASK_SECONDS_WITHOUT_PREVIEW


def preview_values(resource: dict[str, Any]) -> Iterator[str]:
    """The keys of PREVIEWS whose values a job or a service has, given as JSON."""
    template = resource["template"].get("template", resource["template"])  # a job's task, or a service's revision
    accelerator = template.get("nodeSelector", {}).get("accelerator", "")
    is_task = template is not resource["template"]
    if is_task and accelerator and _seconds(template["timeout"]) > GPU_TASK_SECONDS_WITHOUT_PREVIEW.most:
        yield "gpu_task_timeout"
    if any(volume.get("emptyDir", {}).get("medium") == "DISK" for volume in template.get("volumes", ())):
        yield "ephemeral_disk"
    if accelerator == "nvidia-rtx-pro-6000":
        yield "rtx_pro_6000"


def with_launch_stage(resource: dict[str, Any]) -> dict[str, Any]:
    """The resource with the launch stage that its values need; without one, Cloud Run assumes GA."""
    return {**resource, "launchStage": "BETA"} if any(preview_values(resource)) else resource


def _seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))
