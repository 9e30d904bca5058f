"""The first rows of a data set, judged before a machine is paid for."""

from __future__ import annotations

from dropforge.base.errors import SpecProblem
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients
from dropforge.rows.sample import SAMPLE_BYTES, SUFFIXES, sample_problems
from dropforge.spec import Dataset, JobSpec

from .sources import parts_of


def column_problems(spec: JobSpec, clients: Clients) -> list[SpecProblem]:
    """The faults in the first rows of a spec's data sets.

    Data sets of the Hub, Parquet files, and objects that you may not read are left to the training container.
    """
    if not isinstance(spec.dataset, Dataset):
        return []
    problems = []
    for pointer, uri in spec.sources.items():
        data = None if pointer == "/model/source" else first_bytes(uri, clients)
        if data is not None:
            problems += sample_problems(spec.dataset, uri, data)
    return list(dict.fromkeys(problems))


def first_bytes(uri: str, clients: Clients) -> bytes | None:
    """The first SAMPLE_BYTES of a gs:// object of text; None if they cannot be read here."""
    from google.api_core.exceptions import GoogleAPICallError

    if not uri.startswith("gs://") or not uri.endswith(SUFFIXES):
        return None
    bucket, name = parts_of(uri)
    blob = clients.storage().bucket(bucket).blob(name)
    try:
        return bytes(blob.download_as_bytes(end=SAMPLE_BYTES - 1, timeout=TIMEOUT_SECONDS))
    except GoogleAPICallError:
        return None
