"""What a spec reads: the example sources and secrets of the local stack, and sources that do not exist.

`dropforge put` copies a file or a directory to where a spec can name it.
"""

from __future__ import annotations

import glob
import os
import re
import secrets as random_secrets
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from dropforge.base.errors import SpecProblem
from dropforge.base.figures import duration
from dropforge.base.names import parse_gs_uri
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients
from dropforge.rows.files import BadFile
from dropforge.rows.sample import GZIP
from dropforge.rows.sources import GLOB, NoFiles, exists, is_glob, one_format
from dropforge.run.artifacts import upload_directory
from dropforge.spec import JobSpec
from dropforge.spec.misnamed import file_problem, is_file_name
from dropforge.tell.channels import secrets_of

from .deployment import Deployment, connect
from .display import working
from .machine import check_machine
from .options import is_terminal, state_option
from .plain import echo, plain
from .problems import CliError

# As in check_source of the spec; https://cloud.google.com/storage/docs/buckets#naming
BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
EXAMPLES_BUCKET = "local-data"  # of the local stack


class Missing(NamedTuple):
    """A source that does not exist, its place in the spec, and the command that creates it."""

    pointer: str
    message: str
    command: str


@click.command()
@click.argument("path", type=click.Path(exists=True, readable=True, path_type=Path))
@click.argument("uri", metavar="gs://BUCKET/NAME")
@click.option("--make-bucket", is_flag=True, help="Do not ask before a bucket of the local stack is made.")
@state_option
def put(path: Path, uri: str, make_bucket: bool, state: str | None) -> None:
    """Copy a file or a directory to a bucket, so that a spec can name it; prints its URI."""
    deployment = connect(state)
    bucket, name = parse_gs_uri(uri) if re.match("gs://[^/]", uri) else ("", "")
    if not name:
        raise CliError(f"the URI is {uri!r}; expected gs://BUCKET/NAME", f"such as gs://local-data/{path.name}")
    if not re.fullmatch(BUCKET, bucket):
        expected = "lower-case letters, digits, -, _ and ., with a letter or a digit at both ends"
        raise CliError(f"the bucket's name is {bucket!r}; expected {expected}", f"such as gs://local-data/{path.name}")
    client = deployment.clients.storage()
    if deployment.stack is not None:
        if not make_bucket and bucket != EXAMPLES_BUCKET:
            _ask_for_bucket(client, bucket)
        _make_bucket(client, bucket)
    with working(f"copying to {uri}"):
        upload(client, path, uri)
    echo(uri)


def _ask_for_bucket(client: Any, bucket: str) -> None:
    """Ask before a bucket is made: its name may be a slip. Raises CliError without a terminal."""
    known = [each.name for each in client.list_buckets(timeout=TIMEOUT_SECONDS)]
    if bucket in known:
        return
    close = get_close_matches(bucket, known, n=1)
    text = f"the bucket gs://{bucket} does not exist" + (f"; did you mean gs://{close[0]}?" if close else "")
    if not is_terminal():
        raise CliError(text, "`--make-bucket` makes it")
    echo(text, err=True)
    click.confirm(plain(f"Make gs://{bucket}?"), abort=True, err=True)


def prepare(spec: JobSpec, deployment: Deployment) -> None:
    """Make a spec's example sources and secrets on a local stack.

    Raises CliError if another source is missing, or if the local stack cannot run the spec on this machine.
    """
    if deployment.stack is not None:
        check_machine(spec)
    with working("looking for the model and the data"):
        absent = missing(spec, deployment)
    examples = [uri for uri in absent if deployment.stack is not None and uri in SOURCES]
    if unknown := [
        problem for uri, problem in absent.items() if uri not in examples
    ]:  # before minutes of making others
        first, *rest = unknown
        also = "".join(f"\n{problem.pointer}: {problem.message}; {problem.command}" for problem in rest)
        raise CliError(f"{first.pointer}: {first.message}{also}", first.command)
    if deployment.stack is not None:
        for name in make_secrets(spec, deployment):
            echo(f"created the secret {name} for this stack", err=True)
        for uri in examples:
            began = time.monotonic()
            how = ": trained once, in a minute" if uri == spec.model.source else ""
            echo(f"makes {uri}{how}", err=True)
            with working(f"makes {uri}"):
                upload_source(deployment.clients, uri)
            echo(f"created {uri} in {duration(time.monotonic() - began)}", err=True)


def local_files(spec: JobSpec) -> list[SpecProblem]:
    """The problems of data sources with the name of a Hub id and of a file of this machine."""
    return [
        file_problem(pointer, source)
        for pointer, source in spec.sources.items()
        if pointer != "/model/source" and Path(source).is_file() and not is_file_name(source)
    ]


def local_paths(sources: Iterable[str]) -> list[Path]:
    """The local files that files, folders and globs name, as the training takes them from a bucket.

    Raises BadFile for what the training refuses, and CliError for what cannot be read.
    """
    paths = sorted((path for source in sources for path in _paths(source)), key=str)
    for path, following in pairwise(paths):
        if path == following:
            raise BadFile(f"two of the sources name {path}", "name each file once: its rows would count twice")
    for path in paths:
        _refuse_compressed(path)
    one_format([str(path) for path in paths])
    return paths


def _paths(source: str) -> Iterator[Path]:
    path, is_source_glob = Path(source), is_glob(source) and not Path(source).exists()
    if is_source_glob:
        found = [Path(name) for name in glob.glob(source, recursive=True)]
    else:
        try:
            found = [each for each in path.iterdir() if each.name[0] not in "_."]
        except NotADirectoryError:
            found = [path]
        except OSError as error:
            raise unreadable(path, error) from None
    files = [each for each in found if each.is_file()]
    if not files:
        told = f"no file matches {source}" if is_source_glob else f"the folder {source} has no file"
        raise NoFiles(told, "name a file, a folder with files, or a glob that matches files")
    yield from files


def _refuse_compressed(path: Path) -> None:
    """Raise BadFile for a local file that is compressed by gzip, and whose name does not say it."""
    try:
        with path.open("rb") as file:
            if file.read(2) == GZIP and not path.name.lower().endswith(".gz"):
                raise BadFile(f"{path} is compressed by gzip; expected a name that ends in .gz", "rename the file")
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> CliError:
    """The error of a local file or folder that cannot be read."""
    return CliError(f"the data {path} cannot be read: {error.strerror}", "name a file, a folder, a Hub id or gs://…")


def missing(spec: JobSpec, deployment: Deployment) -> dict[str, Missing]:
    """Return the gs:// sources of a spec that do not exist, by their URIs.

    A source that you may not look at is not among them: dropforge's own accounts may read it.
    """
    found: dict[str, Missing] = {}
    for pointer, uri in spec.sources.items():
        if uri.startswith("gs://") and (what := _lacks(deployment.clients, uri, pointer)):
            bucket, _ = parse_gs_uri(uri)
            is_directory = pointer == "/model/source" or uri.endswith("/") or is_glob(uri)
            target = f"{GLOB.split(uri)[0].rpartition('/')[0]}/" if is_glob(uri) else uri
            put_it = f"dropforge put {'DIRECTORY' if is_directory else 'FILE'} {target}"
            if what == "bucket" and deployment.stack is None:
                settings = deployment.settings
                put_it = (
                    f"gcloud storage buckets create gs://{bucket} --project={settings.project} "
                    f"--location={settings.location} && {put_it}"
                )
            close = get_close_matches(uri, SOURCES, n=1) if deployment.stack is not None else []
            meant = f"; did you mean {close[0]}?" if close else ""
            found[uri] = Missing(pointer, f"{uri} does not exist: no such {what}{meant}", put_it)
    return found


def _lacks(clients: Clients, uri: str, pointer: str) -> Literal["", "bucket", "object"]:
    from google.api_core.exceptions import BadRequest, Forbidden, NotFound

    try:
        found = exists(clients.storage(), uri, is_model=pointer == "/model/source", timeout=TIMEOUT_SECONDS)
    except (BadRequest, NotFound):  # a name that is invalid for a bucket is a bad request
        return "bucket"
    except Forbidden:
        return ""
    return "" if found else "object"


def make_secrets(spec: JobSpec, deployment: Deployment) -> list[str]:
    """Create the secrets that a spec names and the local stack lacks; return their names.

    Secrets of channels lead to the local stack's own services; a mail server is the user's. Every other value is
    meaningless.
    """
    from google.api_core.exceptions import Conflict

    assert deployment.stack is not None, "secrets are made only in a local stack"
    values = {name.partition(":")[0]: f"local-canary-{random_secrets.token_hex(8)}" for name in spec.secrets.values()}
    told = _channel_values(deployment.stack.http)
    values |= {name.partition(":")[0]: told[at] for at, name in secrets_of(spec).items() if at in told}
    project, client, made = f"projects/{deployment.settings.project}", deployment.clients.secrets(), []
    for name, value in values.items():
        secret: dict[str, Any] = {"replication": {"automatic": {}}}
        try:
            client.create_secret(parent=project, secret_id=name, secret=secret, timeout=TIMEOUT_SECONDS)
        except Conflict:
            continue
        payload = {"data": value.encode()}
        client.add_secret_version(parent=f"{project}/secrets/{name}", payload=payload, timeout=TIMEOUT_SECONDS)
        made.append(name)
    return made


def _channel_values(http: str) -> dict[str, str]:
    """What the secrets of channels hold on a local stack, by the JSON pointer at which a spec names the secret."""
    return {
        "/notify/slack/webhook_secret": f"{http}/slack/services/T000/B000/local",
        "/notify/slack/token_secret": "xoxb-local",
        "/notify/webhook/url_secret": f"{http}/channels/webhook/local",
        "/notify/webhook/signing_secret": f"whsec_{b64encode(random_secrets.token_bytes(32)).decode()}",
        "/notify/teams/webhook_secret": f"{http}/channels/teams/local",
        "/notify/github/token_secret": "github_pat_local",
    }


def upload_source(clients: Clients, uri: str) -> None:
    """Create a source in SOURCES, unless it is cached, and upload it with the ordinary storage client."""
    client = clients.storage()
    _make_bucket(client, parse_gs_uri(uri)[0])
    upload(client, SOURCES[uri](cache_directory()), uri)


def cache_directory() -> Path:
    """Return the directory of what is made once for all folders: $DROPFORGE_CACHE, or below the user's cache."""
    if own := os.environ.get("DROPFORGE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dropforge"


def upload(client: Any, path: Path, uri: str) -> None:
    """Upload a file as an object, or the files of a directory below a prefix."""
    if path.is_dir():
        upload_directory(client, path, uri)
    else:
        bucket, name = parse_gs_uri(uri)
        client.bucket(bucket).blob(name).upload_from_filename(str(path), timeout=TIMEOUT_SECONDS)


def _make_bucket(client: Any, name: str) -> None:
    from google.api_core.exceptions import Conflict

    with suppress(Conflict):  # it exists
        client.create_bucket(name, timeout=TIMEOUT_SECONDS)


def _gemma3(cache: Path) -> Path:
    from dropforge_local import tiny

    return tiny.base_model(cache)


def _qwen3(cache: Path) -> Path:
    from dropforge_local import tiny

    return tiny.base_model(cache, "qwen3")


def _text_to_sql(cache: Path) -> Path:
    from dropforge_local import tiny

    return tiny.dataset(cache / "text-to-sql.jsonl", tiny.ROWS)


def _text_to_sql_unseen(cache: Path) -> Path:
    from dropforge_local import tiny

    return tiny.dataset(cache / "text-to-sql-unseen.jsonl", tiny.UNSEEN_ROWS, held_out=True)


# The sources of examples/local/, which `demo` and `submit` make on a local stack. They leave other sources alone.
SOURCES: dict[str, Callable[[Path], Path]] = {
    "gs://local-data/tiny-gemma3": _gemma3,
    "gs://local-data/tiny-qwen3": _qwen3,
    "gs://local-data/text-to-sql.jsonl": _text_to_sql,
    "gs://local-data/text-to-sql-unseen.jsonl": _text_to_sql_unseen,
}
