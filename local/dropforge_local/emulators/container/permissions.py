"""The permissions that each method needs: https://cloud.google.com/kubernetes-engine/docs/reference/api-permissions
(2026-11-23)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..kit import access

NEEDS = access.table(
    """
    list_clusters container.clusters.list parent
    get_cluster container.clusters.get name
    create_cluster container.clusters.create parent
    delete_cluster container.clusters.delete name
    set_labels container.clusters.update name
    list_operations container.operations.list parent
    get_operation container.operations.get name
    get_server_config container.clusters.list name
    list_node_pools container.clusters.get parent
    create_node_pool container.clusters.update parent
    """
)
SERVICE_STATE = access.table("service_state serviceusage.services.get -")["service_state"]


def of_cluster(request: Any) -> Iterator[tuple[str, str]]:
    """Whoever creates a cluster acts as the account of its nodes."""
    defaults = request.cluster.autoscaling.autoprovisioning_node_pool_defaults
    yield access.acts_as(defaults.service_account, request.parent.split("/")[1])


FURTHER = {"create_cluster": of_cluster}
