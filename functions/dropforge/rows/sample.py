"""The first rows of a data set in a bucket, judged as the training will judge all rows: faults cost nothing yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dropforge.base.errors import SpecProblem
from dropforge.cloud.clients import Clients
from dropforge.cloud.objects import read_at_most
from dropforge.spec import Dataset, JobSpec

from .check import Report, check_sample
from .files import BadFile, Raw
from .stream import SUFFIXES, text_rows

SAMPLE_BYTES = 1 << 18  # of an object
GZIP = b"\x1f\x8b"  # `Content-Encoding: gzip`: the training reads the text


def samples_of(spec: JobSpec, clients: Clients, but_from: Collection[str] = ()) -> list[Report]:
    """The checks of the first rows of a spec's data sets, except for those in the buckets `but_from`.

    Data sets of the Hub, files that are no text, and objects that may not be read here are left to the training.
    """
    if not isinstance(spec.dataset, Dataset):
        return []
    reports = []
    for pointer, uri in spec.sources.items():
        if pointer == "/model/source" or _bucket_and_name(uri)[0] in but_from:
            continue
        if (data := first_bytes(uri, clients)) is not None:
            reports.append(check_sample(spec.dataset, uri, sample_rows(uri, data), pointer))
    return reports


def problems_of(reports: list[Report]) -> list[SpecProblem]:
    """What the training would refuse, each problem once."""
    return list(dict.fromkeys(problem for report in reports for problem in report.problems))


def first_bytes(uri: str, clients: Clients) -> bytes | None:
    """The first SAMPLE_BYTES of a gs:// object of text; None if they cannot be read here."""
    from google.api_core.exceptions import GoogleAPICallError

    if not uri.startswith("gs://") or not uri.endswith(SUFFIXES):
        return None
    bucket, name = _bucket_and_name(uri)
    try:
        data = read_at_most(clients.storage().bucket(bucket).blob(name), SAMPLE_BYTES)
    except GoogleAPICallError:
        return None
    return None if data and data.startswith(GZIP) else data


def _bucket_and_name(uri: str) -> tuple[str, str]:
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return bucket, name


def sample_rows(uri: str, data: bytes) -> Iterator[Raw]:
    """The whole rows of the beginning of a file. Raises BadFile."""
    is_cut, is_at_end = len(data) >= SAMPLE_BYTES, False
    held: list[Raw] = []
    problem: BadFile | None = None

    def lines() -> Iterator[bytes]:
        nonlocal is_at_end
        *whole, last = data.splitlines(keepends=True) or [b""]
        yield from whole
        is_at_end = True
        yield last

    try:
        for row in text_rows(uri, lines()):
            yield from held
            held = [row]
    except BadFile as error:
        problem = error
    if not is_cut:
        yield from held
    if problem and not (is_cut and is_at_end):  # what is cut is no fault of the file
        raise problem
