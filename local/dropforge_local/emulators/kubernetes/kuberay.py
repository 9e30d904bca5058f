"""The differences between KubeRay's versions. Google does not document the version of GKE's add-on.

Read in the source at the tags v1.4.2, v1.5.1, v1.6.0 and v1.7.0 (https://github.com/ray-project/kuberay): the builders
of pods in ray-operator/controllers/ray/common/pod.go, the rules in ray-operator/controllers/ray/utils/validation.go,
the fields in ray-operator/config/crd/bases/ray.io_rayjobs.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

HTTP_PROBES_SINCE = (2, 53)  # Ray's version, from whose agent the operator asks for one HTTP health check
AUTH_SINCE = (2, 52)  # Ray's version, the first that can demand a token


@dataclass(frozen=True)
class Operator:
    """A version of the operator, and of the CRDs that come with it.

    `absent` are fields that its CRDs lack, by type: the API server drops them silently. With `http_probes`, the
    operator asks Ray's agent for its health by HTTP if the Ray version has one health check; otherwise wget asks in
    the container.
    """

    absent: Mapping[str, frozenset[str]]
    http_probes: bool = False
    reads_probe_ports: bool = False  # from rayStartParams; before, the ports of the probes are fixed
    validation_failed: bool = True  # an invalid RayJob gets this state; before, there is only an event
    replaces_slices: bool = False  # when one host of a replica is lost; before, the operator replaces that host only
    status_timeout: bool = False  # a RayJob fails when its head has been silent for too long


def _absent(**fields: str) -> Mapping[str, frozenset[str]]:
    return MappingProxyType({name: frozenset(text.split()) for name, text in fields.items()})


_CLUSTER_1_7 = "historyServerOptions networkPolicy tlsOptions"
_BEFORE_1_7 = {"HeadGroupSpec": "ingressOptions", "WorkerGroupSpec": "priority"}
_BEFORE_1_6 = {
    **_BEFORE_1_7,
    "RayJobSpec": "preRunningDeadlineSeconds",
    "RayClusterSpec": f"{_CLUSTER_1_7} upgradeStrategy",
}
OPERATORS = MappingProxyType(
    {
        # authOptions came with v1.5.1: v1.5.0 drops them as 1.4 does.
        "1.4": Operator(
            _absent(
                RayJobSpec="preRunningDeadlineSeconds deletionStrategy",
                RayClusterSpec=f"{_CLUSTER_1_7} upgradeStrategy authOptions",
                HeadGroupSpec="ingressOptions labels resources",
                WorkerGroupSpec="priority labels resources",
            ),
            validation_failed=False,
        ),
        "1.5": Operator(_absent(**_BEFORE_1_6, RayAuthOptions="enableK8sTokenAuth secretName")),
        "1.6": Operator(
            _absent(**_BEFORE_1_7, RayClusterSpec=_CLUSTER_1_7),
            http_probes=True,
            reads_probe_ports=True,
            replaces_slices=True,
        ),
        "1.7": Operator(_absent(), http_probes=True, reads_probe_ports=True, replaces_slices=True, status_timeout=True),
    }
)


def operator(version: str) -> Operator:
    """The operator of a version. Raises ValueError if the version is not known."""
    if version not in OPERATORS:
        raise ValueError(f"kuberay is {version!r}; expected one of {', '.join(OPERATORS)}")
    return OPERATORS[version]


def ray_version(text: str) -> tuple[int, ...] | None:
    """A rayVersion as numbers; None if the operator cannot parse it (ParseGeneric of Kubernetes' apimachinery)."""
    match = re.match(r"\s*v?((?:0|[1-9]\d*)(?:\.\d+)+)", text)
    return tuple(int(number) for number in match[1].split(".")) if match else None


def has_http_probes(operator: Operator, cluster: Mapping[str, Any]) -> bool:
    """Whether the operator probes the nodes of a RayClusterSpec by HTTP."""
    version = ray_version(cluster.get("rayVersion", ""))
    return operator.http_probes and version is not None and version >= HTTP_PROBES_SINCE


def auth_problem(cluster: Mapping[str, Any]) -> str:
    """Why the operator refuses a RayClusterSpec's authOptions; "" if it takes them."""
    if cluster.get("authOptions", {}).get("mode") != "token":
        return ""
    given = cluster.get("rayVersion", "")
    if not given:
        return "authOptions.mode is 'token' but RayVersion was not specified. Ray version 2.52.0 or later is required"
    version = ray_version(given)
    if version is None:
        return f"authOptions.mode is 'token' but RayVersion format is invalid: {given}"
    if version < AUTH_SINCE:
        return f"authOptions.mode is 'token' but minimum Ray version is 2.52.0, got {given}"
    return ""
