"""What a source that is neither a Hub id nor a gs:// URI is instead, and what its author can do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from urllib.parse import unquote

from dropforge.base.errors import SpecProblem
from dropforge.base.redact import cut

# Endings of files with rows or weights. No model and no data set of the Hub has a name like that.
_ENDINGS = (
    "arrow bin bz2 ckpt csv feather gguf gz h5 json jsonl ndjson npz onnx orc parquet pickle pkl pt pth safetensors "
    "sqlite tar tgz tsv txt xls xlsx xml xz yaml yml zip zst"
)
FILE_SUFFIXES = frozenset(f".{ending}" for ending in _ENDINGS.split())
_NAME = r"[A-Za-z0-9][\w.-]*?"
_ID = rf"(?P<id>{_NAME}(?:/{_NAME})?)"
_HUB = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)"
_OBJECT = r"(?P<bucket>[a-z0-9][a-z0-9._-]*)/(?P<object>[^?#;]+)"
_STORAGE = (
    r"(?:https?:)?(?://)?(?:storage\.googleapis\.com|storage\.cloud\.google\.com|storage-download\.googleapis\.com)"
)


def instead(value: str) -> tuple[str, str] | None:
    """What a text is in place of a source, and what is expected; None for a text of no known kind."""
    for pattern, answer in _KINDS:
        if match := pattern.fullmatch(value):
            return answer(match)
    return None


def file_problems(sources: Mapping[str, str]) -> list[SpecProblem]:
    """The problems of sources, by their place in a spec, that have the form of a Hub id and the name of a file.

    A spec with such sources can be read: `dropforge data check` reads the files.
    """
    return [file_problem(pointer, source) for pointer, source in sources.items() if is_file_name(source)]


def is_file_name(source: str) -> bool:
    """Whether a source that is no gs:// URI has the name of a file."""
    return not source.startswith("gs://") and PurePosixPath(source).suffix.lower() in FILE_SUFFIXES


def file_problem(pointer: str, source: str) -> SpecProblem:
    """The problem of a source that is a file of its author's machine."""
    message, expected = local_file(source)
    return SpecProblem(pointer, message, repr(cut(source, 120)), expected)


def local_file(path: str) -> tuple[str, str]:
    """The answer to a file or a folder of the author's machine."""
    name = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    put = f"dropforge put {shlex.quote(cut(path, 200))} gs://BUCKET/{cut(name, 100)}"
    return "a file on this machine, which the training cannot read", f"the URI that `{put}` prints"


def _of_hub(match: re.Match[str]) -> tuple[str, str]:
    parts = match.groupdict()
    revision = parts.get("revision")
    beside = f", with {cut(revision, 100)!r} as its `revision`" if revision and revision != "main" else ""
    return "a Hub id in another form", f"did you mean {cut(parts['id'].rstrip('/'), 200)!r}{beside}?"


def _with_revision(match: re.Match[str]) -> tuple[str, str]:
    name, revision = cut(match["id"], 200), cut(match["revision"], 100)
    if "/" not in name:
        return "a name with a tag, as in Ollama", "the model's id on the Hugging Face Hub: owner/name"
    return "a Hub id has no revision", f"did you mean {name!r}, with {revision!r} in the field `revision` beside it?"


def _of_storage(match: re.Match[str]) -> tuple[str, str]:
    uri = f"gs://{match['bucket']}/{unquote(match['object'])}"
    return "an object of Cloud Storage in another form", f"did you mean {cut(uri, 300)!r}?"


def _of_cache(match: re.Match[str]) -> tuple[str, str]:
    return "a folder of the Hub's cache", f"did you mean {cut(match['id'].replace('--', '/', 1), 200)!r}?"


def _copied(what: str) -> Callable[[re.Match[str]], tuple[str, str]]:
    def answer(match: re.Match[str]) -> tuple[str, str]:
        return what, "a Hugging Face Hub id (owner/name), or gs://bucket/path after you have copied it to a bucket"

    return answer


_ROWS = (
    (
        rf"{_HUB}/(?:datasets/|spaces/)?{_ID}(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)[^?#]*|/)?(?:[?#].*)?",
        _of_hub,
    ),
    (rf"hf://(?:datasets/|models/)?{_ID}(?:@(?P<revision>[^/]+))?(?:/.*)?", _of_hub),
    (rf"(?=\s|.*(?:[\s/]|\.git)\Z)\s*{_ID}(?:\.git|/)?\s*", _of_hub),
    (rf"(?:models|datasets)--(?P<id>{_NAME})", _of_cache),
    (rf"{_ID}[@:#](?P<revision>\w[\w./-]*)", _with_revision),
    (rf"{_STORAGE}/(?:download/)?storage/v1/b/(?P<bucket>[^/]+)/o/(?P<object>[^?#]+)(?:[?#].*)?", _of_storage),
    (r"https?://www\.googleapis\.com/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<object>[^?#]+)(?:[?#].*)?", _of_storage),
    (rf"https?://console\.cloud\.google\.com/storage/browser/(?:_details/)?{_OBJECT}(?:[?#;].*)?", _of_storage),
    (rf"{_STORAGE}/{_OBJECT}(?:[?#].*)?", _of_storage),
    (r"https?://(?P<bucket>[a-z0-9][a-z0-9._-]*)\.storage\.googleapis\.com/(?P<object>[^?#]+)(?:[?#].*)?", _of_storage),
    (rf"(?:(?i:gs|gcs|gsutil):/{{0,3}}|/gcs/){_OBJECT}", _of_storage),
    (r"file:(?://)?(?P<path>.+)", lambda match: local_file(match["path"])),
    (r"(?i:s3a?|az|abfss?|wasbs?|adl|r2|oss)://.*", _copied("a bucket of another cloud")),
    (r"(?:git@|git\+|ssh://|(?:https?://)?(?:www\.)?(?:github|gitlab)\.com/).*", _copied("a repository of Git")),
    (r"[a-z][a-z0-9+.-]*://.*", _copied("a URL, which the training does not read")),
    (r"(?:\.{1,2}|~[\w-]*|[A-Za-z]:)?[\\/].*|\.{1,2}|~|.*\\.*", lambda match: local_file(match[0])),
)
_KINDS = [(re.compile(pattern), answer) for pattern, answer in _ROWS]
