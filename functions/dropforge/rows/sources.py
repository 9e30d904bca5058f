"""The files of a data set: what a name says about a file, and the objects that a URI in a spec names.

The command line, the control plane and the trainers find the same files in the same order. Here also are the rows of a
file for those who have no PyArrow.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from dropforge.base.names import parse_gs_uri

from .files import BadFile, Raw, text_of_file, text_rows

TEXT = (".jsonl", ".json", ".csv", ".tsv")
ARROW = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
MAX_FILES = 1000  # the manifest of a model lists each
MAX_BYTES = 64 * 2**30  # of all files together, as they are and unpacked: the training's disk has them
GLOB = re.compile(r"[*?\[{]")
EXPECTED = f"a name ending in {', '.join(TEXT)} (also with {' or '.join(COMPRESSIONS)}), {' or '.join(ARROW)}"


class Format(NamedTuple):
    """The format of a file, as its suffix, and the compression's suffix ("" if it has none)."""

    suffix: str
    compression: str = ""


class File(NamedTuple):
    """An object of Cloud Storage with its gs:// URI."""

    uri: str
    blob: Any


class NoFiles(BadFile):
    """A source that names no file."""


def format_of(name: str) -> Format:
    """The format that a file's name tells. Raises BadFile."""
    path = name.rpartition("/")[2].lower()
    compression = next((end for end in COMPRESSIONS if path.endswith(end)), "")
    path = path.removesuffix(compression)
    suffix = next((end for end in (*TEXT, *ARROW) if path.endswith(end)), "")
    if not suffix:
        raise BadFile(f"{name} has no extension of a data file; expected {EXPECTED}")
    if compression and suffix in ARROW:
        raise BadFile(f"{name} is compressed as a whole, and {suffix} compresses its columns", "unpack the file")
    return Format(suffix, compression)


def is_read(name: str) -> bool:
    """Whether `rows_of` reads a file with this name: text, as it is or compressed by gzip."""
    try:
        suffix, compression = format_of(name)
    except BadFile:
        return False
    return suffix in TEXT and compression in ("", ".gz")


def rows_of(file: BinaryIO, name: str) -> Generator[Raw, None, None]:
    """The rows of an open file whose name `is_read`. Closes it. Raises BadFile."""
    suffix, compression = format_of(name)
    with file:
        data = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if compression else file
        try:
            with text_of_file(data, suffix) as text:
                yield from text_rows(text, suffix)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise BadFile("the data set is not a complete .gz file", "compress the file again") from None


def one_format(names: Sequence[str]) -> str:
    """The suffix that all files have. Raises BadFile, which names the first file with another one."""
    suffix = format_of(names[0]).suffix
    for name in names[1:]:
        if (other := format_of(name).suffix) != suffix:
            raise BadFile(
                f"{name} is a {other} file, and {names[0]} a {suffix} file; expected files of one format",
                f"name the files by a glob, such as gs://bucket/folder/*{suffix}, or convert some of them",
            )
    return suffix


def files_of(client: Any, uris: Iterable[str], **options: Any) -> list[File]:
    """The files that the URIs name, in the order of their names. `options` go to the client.

    Raises BadFile: NoFiles for a URI that names no object, others for formats that are not one, for an object that two
    URIs name, and for more than MAX_FILES or MAX_BYTES.
    """
    found: dict[str, File] = {}
    for uri in uris:
        first = True
        for file in _files(client, uri, **options):
            first = False
            if file.uri in found:
                raise BadFile(f"two of the sources name {file.uri}", "name each file once: its rows would count twice")
            found[file.uri] = file
            if len(found) > MAX_FILES:
                raise BadFile(f"{uri} has more than {MAX_FILES:,} files", "join some of the files")
        if first:
            raise _no_files(uri)
    names = sorted(found)
    one_format(names)
    if (total := sum(file.blob.size or 0 for file in found.values())) > MAX_BYTES:
        raise BadFile(f"the {len(found)} files have {total} bytes; expected at most {MAX_BYTES}", "take fewer rows")
    return [found[name] for name in names]


def _no_files(uri: str) -> NoFiles:
    if uri.endswith("/"):
        return NoFiles(
            f"the folder {uri} has no file", f"upload files, or write {uri}**/*.jsonl for files of folders in it"
        )
    if is_glob(uri):
        return NoFiles(f"no object matches {uri}", "correct the glob: * matches a part of a name, ** also folders")
    return NoFiles(f"the data set {uri!r} does not exist", f"upload it, or correct the URI ({uri}/ is a folder)")


def _files(client: Any, uri: str, **options: Any) -> Iterator[File]:
    bucket, name = parse_gs_uri(uri)
    if not is_many(uri):
        blob = client.bucket(bucket).get_blob(name, **options)
        yield from [File(uri, blob)] if blob is not None else []
        return
    for blob in _listed(client, uri, **options):
        yield File(f"gs://{bucket}/{blob.name}", blob)


def _listed(client: Any, uri: str, **options: Any) -> Iterator[Any]:
    """The objects of a folder, with `/` at its end, or those that match a glob.

    A folder's files whose names begin with `_` or `.` are notes of other programs (`_SUCCESS`).
    """
    bucket, name = parse_gs_uri(uri)
    prefix = name if uri.endswith("/") else GLOB.split(name)[0].rpartition("/")[0]
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    rest = name.removeprefix(prefix) or "*"
    pattern = re.compile(re.escape(prefix) + _pattern(rest))
    # With a delimiter, the service leaves out the objects of other folders.
    for blob in client.list_blobs(bucket, prefix=prefix, delimiter=None if "/" in rest else "/", **options):
        own = blob.name.rpartition("/")[2]
        if own and pattern.fullmatch(blob.name) and (is_glob(uri) or own[0] not in "_."):
            yield blob


def exists(client: Any, uri: str, *, is_model: bool, **options: Any) -> bool:
    """Whether a source of a spec has an object. A model is all that is below its URI, with `/` at its end or not."""
    pattern = f"{uri.rstrip('/')}/**" if is_model else uri
    if is_many(pattern):
        return any(True for _ in _listed(client, pattern, **options))
    # The object is the first with this prefix. A list, unlike a read, tells a missing bucket from a missing object.
    bucket, name = parse_gs_uri(uri)
    return any(blob.name == name for blob in client.list_blobs(bucket, prefix=name, max_results=1, **options))


def is_glob(uri: str) -> bool:
    return bool(GLOB.search(uri))


def is_many(uri: str) -> bool:
    """Whether a URI may name several files: a folder, with `/` at its end, or a glob."""
    return uri.endswith("/") or is_glob(uri)


def _pattern(glob: str) -> str:
    """A glob as a regular expression, as Cloud Storage's `matchGlob` reads it.

    https://cloud.google.com/storage/docs/json_api/v1/objects/list#list-objects-and-prefixes-using-glob (2026-11-29)
    """
    made, depth = "", 0
    for part in re.findall(r"\*\*/?|\[!?[^]]+\]|.", glob, re.DOTALL):
        if part.startswith("**"):
            made += "(?:.*/)?" if part.endswith("/") else ".*"
        elif part in "*?":
            made += "[^/]*" if part == "*" else "[^/]"
        elif len(part) > 1:
            one_of = part[1:-1].replace("\\", r"\\").replace("^", r"\^")
            made += f"[^/{one_of[1:]}]" if one_of[0] == "!" else f"[{one_of}]"
        elif part == "{":
            made, depth = f"{made}(?:", depth + 1
        elif part == "}" and depth:
            made, depth = f"{made})", depth - 1
        else:
            made += "|" if part == "," and depth else re.escape(part)
    return made + ")" * depth
