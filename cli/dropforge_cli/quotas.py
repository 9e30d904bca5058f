"""How high a quota is in a project. The platforms say which quota counts their accelerators."""

from __future__ import annotations

from typing import Any

from dropforge.spec.demand import Quota

from . import google_apis
from .google_apis import NotAsked, Refused


def limit(project: str, quota: Quota) -> float | None:
    """How many accelerators the quota allows a project; None when it is listed without a value. Its usage is not known.

    Raises NotAsked when Cloud Quotas does not list the quota or may not be asked.
    https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos/get
    """
    path = f"v1/projects/{project}/locations/global/services/{quota.service}/quotaInfos/{quota.id}"
    try:
        listed = google_apis.get("cloudquotas", path).get("dimensionsInfos", ())
    except Refused as error:
        if error.status == 404:
            raise NotAsked(f"no such quota is listed: {quota.id}") from None
        if error.status == 403:
            raise NotAsked(f"Cloud Quotas may not be asked for {quota.id}: {error}") from None
        raise
    fitting = [one for one in listed if _applies(one, quota)]
    if not fitting:
        raise NotAsked(f"{quota.id} is not listed for {_place(quota)}")
    value = max(fitting, key=lambda one: len(one.get("dimensions", {}))).get("details", {}).get("value")
    if value is None:
        return None
    return float(value) / quota.units if float(value) >= 0 else float("inf")


def _applies(one: dict[str, Any], quota: Quota) -> bool:
    """An entry without our dimensions is a default, for the places that it lists."""
    dimensions, place = one.get("dimensions", {}), _place(quota)
    here = place in one.get("applicableLocations", ()) or place in dimensions.values()
    return here and dimensions.items() <= quota.dimensions.items()


def _place(quota: Quota) -> str:
    return quota.dimensions.get("zone") or quota.dimensions["region"]
