"""The first rows of a data set in a bucket, judged as the training will judge all rows: faults cost nothing yet."""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Collection, Iterator

from dropforge.base.errors import SpecProblem
from dropforge.base.names import parse_gs_uri
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients
from dropforge.cloud.objects import read_at_most
from dropforge.spec import Dataset, JobSpec

from .check import SOURCE, Report, check_sample, refused
from .files import BadFile, Raw, UnfinishedFile, text_of_file, text_rows
from .sources import NoFiles, files_of, format_of, is_read

SAMPLED_FILES = 8  # of a data set of many: the first ones
SAMPLE_BYTES = 1 << 18  # of an object, and of what it unpacks to
GZIP = b"\x1f\x8b"  # `Content-Encoding: gzip`: the training reads the text
CUT_CHARACTER = re.compile(rb"[\xc0-\xff][\x80-\xbf]{0,3}\Z")


def samples_of(spec: JobSpec, clients: Clients, but_from: Collection[str] = ()) -> list[Report]:
    """The checks of the files' names and first rows of a spec's data sets, except for the buckets `but_from`.

    Data sets of the Hub, files whose rows only the training reads, and objects that may not be read here are left to
    the training. Admission names objects that do not exist.
    """
    if not isinstance(spec.dataset, Dataset):
        return []
    reports: list[Report] = []
    evaluated = spec.evaluation.source if spec.evaluation else None
    for pointer, uris in ((SOURCE, spec.dataset.sources), ("/evaluation/source", [evaluated] if evaluated else [])):
        allowed = [uri for uri in uris if uri.startswith("gs://") and parse_gs_uri(uri)[0] not in but_from]
        try:
            for uri in _names(allowed, clients):
                if (data := first_bytes(uri, clients)) is not None:
                    reports.append(check_sample(spec.dataset, uri, sample_rows(uri, data), pointer))
        except NoFiles:
            continue
        except BadFile as problem:
            reports.append(refused(spec.dataset, problem, pointer))
    return reports


def problems_of(reports: list[Report]) -> list[SpecProblem]:
    """What the training would refuse, each problem once."""
    return list(dict.fromkeys(problem for report in reports for problem in report.problems))


def _names(uris: list[str], clients: Clients) -> list[str]:
    """The first files that URIs name; none if they may not be listed here. Raises BadFile."""
    from google.api_core.exceptions import GoogleAPICallError

    try:
        files = files_of(clients.storage(), uris, timeout=TIMEOUT_SECONDS) if uris else []
    except GoogleAPICallError:
        return []
    return [file.uri for file in files[:SAMPLED_FILES]]


def first_bytes(uri: str, clients: Clients) -> bytes | None:
    """The first SAMPLE_BYTES of a gs:// object of text; None if they cannot be read here."""
    from google.api_core.exceptions import GoogleAPICallError

    if not uri.startswith("gs://") or not is_read(uri):
        return None
    bucket, name = parse_gs_uri(uri)
    try:
        data = read_at_most(clients.storage().bucket(bucket).blob(name), SAMPLE_BYTES)
    except GoogleAPICallError:
        return None
    return None if data and data.startswith(GZIP) and not format_of(uri).compression else data


def sample_rows(uri: str, data: bytes) -> Iterator[Raw]:
    """The whole rows of the beginning of a file. Raises BadFile."""
    suffix, compression = format_of(uri)
    is_cut = len(data) >= SAMPLE_BYTES
    if compression:
        data, is_cut = _unpacked(data, is_cut)
    if is_cut:
        data = _whole_lines(data, suffix)
    try:
        with text_of_file(io.BytesIO(data), suffix) as text:
            yield from text_rows(text, suffix)
    except UnfinishedFile:
        if not is_cut:
            raise


def _unpacked(data: bytes, is_cut: bool) -> tuple[bytes, bool]:
    """The beginning of what gzip has packed, and whether more follows. Raises BadFile."""
    unpacker = zlib.decompressobj(wbits=31)  # a header and a trailer of gzip
    try:
        found = unpacker.decompress(data, SAMPLE_BYTES)
    except zlib.error:
        found = None
    if found is None or not (unpacker.eof or unpacker.unconsumed_tail or is_cut):
        raise BadFile("the data set is not a complete .gz file", "compress the file again")
    return found, is_cut or not unpacker.eof or bool(unpacker.unused_data)


def _whole_lines(data: bytes, suffix: str) -> bytes:
    """The lines of the beginning of a file without the last one, which is cut. A list may have a single line."""
    if suffix == ".json" and data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return CUT_CHARACTER.sub(b"", data)
    return data[: 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))]
