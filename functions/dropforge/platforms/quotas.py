"""The limit of a quota in a project. Each platform declares the quota that counts its accelerators."""

from __future__ import annotations

from typing import Any

from dropforge.cloud import google_apis
from dropforge.cloud.google_apis import NotAsked, Refused
from dropforge.spec.demand import Quota


def limit(project: str, quota: Quota) -> float | None:
    """Return how many accelerators the quota allows; None if the quota has no value. The usage is unknown.

    Raises NotAsked if Cloud Quotas does not list the quota, or refuses the caller.
    https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos/get
    """
    path = f"v1/projects/{project}/locations/global/services/{quota.service}/quotaInfos/{quota.id}"
    try:
        listed = google_apis.get("cloudquotas", path).get("dimensionsInfos", ())
    except Refused as error:
        if error.status == 404:
            raise NotAsked(f"no such quota is listed: {quota.id}") from None
        if error.status == 403:
            raise NotAsked(f"Cloud Quotas refuses the caller for {quota.id}: {error}") from None
        raise
    fitting = [entry for entry in listed if _applies(entry, quota)]
    if not fitting:
        raise NotAsked(f"{quota.id} is not listed for {_place(quota)}")
    value = max(fitting, key=lambda entry: len(entry.get("dimensions", {}))).get("details", {}).get("value")
    if value is None:
        return None
    return float(value) / quota.units if float(value) >= 0 else float("inf")


def _applies(entry: dict[str, Any], quota: Quota) -> bool:
    """Whether an entry is about the quota's place. An entry without dimensions is the default of its locations."""
    dimensions, place = entry.get("dimensions", {}), _place(quota)
    covers_place = place in entry.get("applicableLocations", ()) or place in dimensions.values()
    return covers_place and dimensions.items() <= quota.dimensions.items()


def _place(quota: Quota) -> str:
    return quota.dimensions.get("zone") or quota.dimensions["region"]
