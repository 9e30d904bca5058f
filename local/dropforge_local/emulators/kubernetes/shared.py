"""The objects that all clusters of an emulator share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..cloudrun.counts import Counts
from ..kit.host import Host
from .config import KubernetesConfig
from .faults import Faults
from .kubelet.runner import Runner
from .ports import Ports

# Receives each authorized request: headers, cluster, verb, and the resource as a Role names it (batch/jobs).
Note = Callable[[Mapping[str, str], str, str, str], None]


@dataclass(frozen=True)
class Shared:
    """The settings, the containers and the fault switches; `authorize` decides from a request's headers.

    `enter` lets the rest of a request act as its account. The clusters in `standing` have the deployment's Roles.
    `balanced` are the answers of pods through the load balancers of Gateways.
    """

    host: Host
    config: KubernetesConfig
    faults: Faults
    runner: Runner
    ports: Ports
    authorize: Callable[[Mapping[str, str]], bool]
    note: Note
    enter: Callable[[Mapping[str, str]], None]
    standing: Collection[str]
    balanced: Counts
