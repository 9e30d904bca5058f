"""The job specs in the specs bucket: each is a run, or becomes a run within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dropforge.base import names
from dropforge.cloud.clients import TIMEOUT_SECONDS

from .deployment import Deployment

if TYPE_CHECKING:
    from google.cloud.storage import Blob


def dropped_specs(deployment: Deployment, most: int | None = None) -> Iterator[Blob]:
    """Yield the specs among the first `most` objects of the specs bucket; none without the right to list the bucket."""
    from google.api_core.exceptions import Forbidden

    blobs = deployment.clients.storage().list_blobs(
        deployment.settings.specs_bucket, prefix=names.SPECS_PREFIX, max_results=most, timeout=TIMEOUT_SECONDS
    )
    try:
        yield from (blob for blob in blobs if names.is_spec_object(blob.name))
    except Forbidden:
        return


def run_of_spec(deployment: Deployment, blob: Blob) -> str:
    """Return the id of the run that a spec becomes."""
    return names.run_id_of_object(deployment.settings.specs_bucket, blob.name, blob.generation)


def is_dropped(deployment: Deployment, run: str) -> bool:
    """Whether a run comes from a spec that is in the specs bucket now."""
    return any(run_of_spec(deployment, blob) == run for blob in dropped_specs(deployment))
