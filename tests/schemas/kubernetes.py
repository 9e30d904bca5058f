"""Kubernetes' own schemas, from the package kubernetes-validate; the strict ones, which refuse unknown fields."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate

VERSION = "1.35"
# The types that an emulator or a manifest of dropforge has. No short name is in two of the groups.
GROUPS = (
    "io.k8s.api.apps.v1",
    "io.k8s.api.autoscaling.v2",
    "io.k8s.api.batch.v1",
    "io.k8s.api.coordination.v1",
    "io.k8s.api.core.v1",
    "io.k8s.api.networking.v1",
    "io.k8s.api.rbac.v1",
    "io.k8s.api.storage.v1",
    "io.k8s.apimachinery.pkg.apis.meta.v1",
)


def check(manifest: dict[str, Any]) -> None:
    """Raise kubernetes_validate.ValidationError if Kubernetes would refuse the manifest or drop one of its fields."""
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def check_pod_template(template: dict[str, Any]) -> None:
    """Check the pod template that another object contains, such as a RayJob."""
    check({"apiVersion": "v1", "kind": "PodTemplate", "template": template})


@cache
def definitions() -> dict[str, Any]:
    """The schema of every type of GROUPS by its short name, such as `PodSpec`."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    described: dict[str, Any] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    named = [name.rpartition(".") for name in described]
    return {short: described[f"{group}.{short}"] for group, _, short in named if group in GROUPS}
