"""Who may do what, with Google's client at the addresses of accounts, under the bindings of terraform/."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from google.api_core.exceptions import Forbidden, NotFound, PreconditionFailed, Unauthorized
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge.stages.access import boundary
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.identity import BOUNDED, Identity
from dropforge_local.base.recording import FUNCTIONS, HEADER, SERVER, TRAINER
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.iam import Callers, Policy
from dropforge_local.iam.terraform import read_configuration
from dropforge_local.stack import deployment
from dropforge_local.stack.config import ROOT
from dropforge_local.stack.functions_host import entry_points

RUNS, SPECS, DATA = deployment.RUNS_BUCKET, deployment.SPECS_BUCKET, "data"
IDENTITY = Identity("secret")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("guarded")
    policy = Policy(read_configuration(ROOT / "terraform", deployment.VARIABLES))

    def build() -> list[Any]:
        emulator = StorageEmulator(Database(state / "state.db"), state / "blobs", SystemClock())
        for bucket in (RUNS, SPECS, DATA):
            emulator.create_bucket(bucket)
        return [emulator]

    with BackgroundServer(build, Callers(policy, IDENTITY, deployment.account_of)) as server:
        yield server


@pytest.fixture
def at(server: Server) -> Callable[..., storage.Client]:
    """Google's client at the address of a caller; `function` is a function's name."""

    def at(caller: str, function: str = "") -> storage.Client:
        session = requests.Session()
        session.headers[HEADER] = function
        url = server.addresses(caller)[0]
        return storage.Client("p", AnonymousCredentials(), _http=session, client_options={"api_endpoint": url})

    return at


Bounded = Callable[..., storage.Client]
RUN, OTHER = "job-0123456789ab", "job-fedcba987654"


@pytest.fixture
def bounded(server: Server) -> Bounded:
    """Google's client with the token that the function `access` gives the containers of a run."""

    def bounded(run: str, *, is_trainer: bool = True, source: str = "google/gemma-2b") -> storage.Client:
        spec = SimpleNamespace(sources={"/model/source": source, "/dataset/source": "rows"})
        session = requests.Session()
        rules = json.dumps(boundary(RUNS, run, spec, is_trainer=is_trainer))  # type: ignore[arg-type]
        session.headers["Authorization"] = f"Bearer {IDENTITY.token(BOUNDED, rules, 'access')}"
        url = server.addresses(TRAINER)[0]
        return storage.Client("p", AnonymousCredentials(), _http=session, client_options={"api_endpoint": url})

    return bounded


def write(client: storage.Client, name: str, bucket: str = RUNS, **options: Any) -> None:
    client.bucket(bucket).blob(name).upload_from_string("x", retry=None, **options)


@pytest.mark.parametrize(
    ("caller", "function", "allowed", "refused"),
    [
        (FUNCTIONS, "access", "models/r/a", "runs/r/record.json"),
        (FUNCTIONS, "access", "checkpoints/r/a", "runs/open/r"),
        (FUNCTIONS, "teardown", "runs/r/record.json", "models/r/a"),
        (FUNCTIONS, "on_job_event", "runs/r/events/1.json", "runs/r/record.json"),
    ],
)
def test_an_account_writes_below_its_prefixes_only(
    at: Callable[..., storage.Client], caller: str, function: str, allowed: str, refused: str
) -> None:
    client, suffix = at(caller, function), uuid.uuid4().hex
    write(client, allowed + suffix)
    write(client, allowed + suffix)  # a replacement needs delete, too
    with pytest.raises(Forbidden, match=r"does not have storage.objects.create access to the Google Cloud Storage obj"):
        write(client, refused + suffix)
    with pytest.raises(Forbidden):
        client.bucket(RUNS).blob(refused).create_resumable_upload_session(size=1)
    write(at(""), refused + suffix)
    with pytest.raises(Forbidden, match=r"storage\.objects\.delete"):
        client.bucket(RUNS).blob(refused + suffix).delete(retry=None)
    for source, target in ((allowed, refused), (refused, refused + "2")):
        blob = client.bucket(RUNS).blob(source + suffix)
        with pytest.raises(Forbidden):
            client.bucket(RUNS).copy_blob(blob, client.bucket(RUNS), target + suffix, retry=None)
        with pytest.raises(Forbidden):
            client.bucket(RUNS).blob(target + suffix).compose([blob], retry=None)


@pytest.mark.parametrize(
    ("method", "query", "permission"),
    [
        ("POST", "uploads", "multipartUploads.create"),
        ("PUT", "partNumber=1&uploadId=u", "multipartUploads.create"),
        ("POST", "uploadId=u", "multipartUploads.create"),
        ("DELETE", "uploadId=u", "multipartUploads.abort"),
        ("GET", "uploadId=u", "multipartUploads.listParts"),
    ],
)
def test_a_multipart_upload_needs_googles_permissions(server: Server, method: str, query: str, permission: str) -> None:
    """https://cloud.google.com/storage/docs/access-control/iam-xml; the trainer's role has none of them."""
    path = f"{RUNS}/models/r/a?{query}"
    answer = requests.request(method, f"{server.addresses(TRAINER)[0]}/{path}", timeout=60)
    assert (answer.status_code, f"does not have storage.{permission} access" in answer.text) == (403, True)
    assert "<Code>AccessDenied</Code>" in answer.text
    assert requests.request(method, f"{server.url}/{path}", timeout=60).status_code in (200, 404)


READ_KEYS = {"access", "on_job_event", "provision", "inspect", "deploy", "rollout"}
WRITE_KEYS = {"on_spec_uploaded", "on_spec_message", "sweep"}


def test_the_keys_of_runs_are_for_functions_that_need_them(at: Callable[..., storage.Client]) -> None:
    name = f"keys/{uuid.uuid4().hex}"
    write(at(""), name)
    callers = [(TRAINER, ""), (SERVER, ""), *((FUNCTIONS, function) for function in entry_points())]
    reads, writes = set(), set()
    for caller, function in callers:
        blob = at(caller, function).bucket(RUNS).blob(name)
        with suppress(Forbidden):
            reads.add((function or caller, len(blob.download_as_bytes(retry=None))))
        with suppress(Forbidden):
            write(at(caller, function), f"{name}-{function or caller}")
            writes.add(function or caller)
    assert reads == {(function, 1) for function in READ_KEYS}
    assert writes == WRITE_KEYS
    # The names are the runs' ids, which are no secret.
    assert list(at(FUNCTIONS, "on_job_event").list_blobs(RUNS, prefix="keys/"))


def test_each_part_of_a_batch_is_checked(at: Callable[..., storage.Client], bounded: Bounded) -> None:
    owner, trainer, name = at(""), bounded(RUN), uuid.uuid4().hex
    places = (f"models/{RUN}/{name}", f"models/{OTHER}/{name}")
    for place in places:
        write(owner, place)
    batch = trainer.batch()
    batch.__enter__()
    for place in places:
        trainer.bucket(RUNS).blob(place).delete()
    with pytest.raises(Forbidden):
        batch.__exit__(None, None, None)
    assert [owner.bucket(RUNS).blob(place).exists() for place in places] == [False, True]


@pytest.mark.parametrize("prefix", ["models", "checkpoints", "machines"])
def test_a_token_of_a_run_reaches_the_objects_of_its_run(
    at: Callable[..., storage.Client], bounded: Bounded, prefix: str
) -> None:
    client, name = bounded(RUN), f"{prefix}/{RUN}/{uuid.uuid4().hex}"
    blob = client.bucket(RUNS).blob(name)
    with pytest.raises(NotFound):  # the library takes a 404 for "not there yet", and a 403 for a failure
        blob.reload(retry=None)
    write(client, name)
    write(client, name)
    assert blob.download_as_bytes(retry=None) == b"x"
    if prefix != "machines":  # no container lists these
        assert name in [found.name for found in client.list_blobs(RUNS, prefix=f"{prefix}/{RUN}/", retry=None)]
    blob.delete(retry=None)
    for caller in (TRAINER, SERVER):
        with pytest.raises(Forbidden):
            write(at(caller), name)


def test_a_token_of_a_run_reaches_no_other_run(at: Callable[..., storage.Client], bounded: Bounded) -> None:
    client, owner, leaf = bounded(RUN), at(""), uuid.uuid4().hex
    for place in (f"models/{OTHER}/", f"checkpoints/{OTHER}/", f"machines/{OTHER}/", f"runs/{OTHER}/", "keys/"):
        blob = client.bucket(RUNS).blob(place + leaf)
        write(owner, blob.name)
        for work in (
            lambda blob=blob: blob.download_as_bytes(retry=None),
            lambda blob=blob: blob.delete(retry=None),
            lambda blob=blob: write(client, blob.name),
            lambda blob=blob: write(client, f"{blob.name}-new", if_generation_match=0),
            lambda place=place: list(client.list_blobs(RUNS, prefix=place, retry=None)),
        ):
            with pytest.raises(Forbidden):
                work()
    for prefix in ("", "models/", f"models/{RUN}"):
        with pytest.raises(Forbidden):
            list(client.list_blobs(RUNS, prefix=prefix, retry=None))


def test_a_server_only_reads_the_model_of_its_run(at: Callable[..., storage.Client], bounded: Bounded) -> None:
    client, leaf = bounded(RUN, is_trainer=False), uuid.uuid4().hex
    write(at(""), f"models/{RUN}/{leaf}")
    assert client.bucket(RUNS).blob(f"models/{RUN}/{leaf}").download_as_bytes(retry=None) == b"x"
    assert client.get_bucket(RUNS, retry=None).name == RUNS  # as vLLM's streamer does
    write(client, f"machines/{RUN}/serve/{leaf}")
    for place in (f"models/{RUN}/", f"checkpoints/{RUN}/"):
        with pytest.raises(Forbidden):
            write(client, place + leaf)
    others = [f"{kind}/{OTHER}/{leaf}" for kind in ("models", "checkpoints", "machines", "runs", "caches")]
    for name in (*others, f"keys/{RUN}", f"runs/{RUN}/record.json"):
        write(at(""), name)
        for reader in (client, at(SERVER)):
            with pytest.raises(Forbidden):
                reader.bucket(RUNS).blob(name).download_as_bytes(retry=None)
    for prefix in ("", "models/", f"models/{OTHER}/", "runs/"):
        for reader in (client, at(SERVER)):
            with pytest.raises(Forbidden):
                list(reader.list_blobs(RUNS, prefix=prefix, retry=None))


def test_compiled_code_is_of_the_servers_of_one_run_and_is_never_replaced(
    at: Callable[..., storage.Client], bounded: Bounded
) -> None:
    """Whoever writes it has its code run by the next server."""
    client, name = bounded(RUN, is_trainer=False), f"caches/{RUN}/{uuid.uuid4().hex}.zip"
    with pytest.raises(NotFound):
        client.bucket(RUNS).blob(name).download_as_bytes(retry=None)
    write(client, name, if_generation_match=0)
    assert client.bucket(RUNS).blob(name).download_as_bytes(retry=None) == b"x"
    with pytest.raises((Forbidden, PreconditionFailed)):
        write(client, name, if_generation_match=0)
    for works in (
        lambda: write(client, name),
        lambda: client.bucket(RUNS).blob(name).delete(retry=None),
        lambda: client.bucket(RUNS).blob(name).compose([client.bucket(RUNS).blob(name)], retry=None),
    ):
        with pytest.raises(Forbidden):
            works()
    for other in (bounded(OTHER, is_trainer=False), bounded(RUN), bounded(OTHER), at(SERVER), at(TRAINER)):
        for work in (
            lambda other=other: write(other, f"caches/{RUN}/{uuid.uuid4().hex}.zip", if_generation_match=0),
            lambda other=other: other.bucket(RUNS).blob(name).download_as_bytes(retry=None),
        ):
            with pytest.raises(Forbidden):
                work()


def test_the_models_that_a_spec_names_may_be_read(at: Callable[..., storage.Client], bounded: Bounded) -> None:
    client, leaf = bounded(RUN, source=f"gs://{RUNS}/models/{OTHER}/attempt-1/model"), uuid.uuid4().hex
    blob = client.bucket(RUNS).blob(f"models/{OTHER}/{leaf}")
    write(at(""), blob.name)
    assert blob.download_as_bytes(retry=None) == b"x"
    with pytest.raises(Forbidden):
        write(client, blob.name)


@pytest.mark.parametrize(
    "source",
    [
        f"gs://{RUNS}/keys/{OTHER}/x",
        f"gs://{RUNS}/runs/{OTHER}/record.json",
        f"gs://{RUNS}/models/",
        f"gs://{RUNS}/models/') || true || resource.name.startsWith('/x",
        f"gs://other/models/{OTHER}/x",
    ],
)
def test_no_other_source_widens_the_token(at: Callable[..., storage.Client], bounded: Bounded, source: str) -> None:
    client = bounded(RUN, source=source)
    for name in (f"keys/{OTHER}", f"runs/{OTHER}/record.json", f"models/{OTHER}/x"):
        write(at(""), name)
        with pytest.raises(Forbidden):
            client.bucket(RUNS).blob(name).download_as_bytes(retry=None)


def test_only_who_may_list_learns_that_an_object_is_missing(at: Callable[..., storage.Client]) -> None:
    with pytest.raises(NotFound):
        at(FUNCTIONS, "teardown").bucket(RUNS).blob("none").download_as_bytes(retry=None)
    with pytest.raises(Forbidden, match=r"storage\.objects\.get"):
        at(SERVER).bucket(DATA).blob("none").download_as_bytes(retry=None)
    with pytest.raises(Forbidden, match=r"storage\.objects\.list"):
        list(at(SERVER).bucket(DATA).list_blobs())


def test_an_object_that_exists_is_not_replaced_without_delete(at: Callable[..., storage.Client]) -> None:
    name = f"models/{uuid.uuid4().hex}"
    write(at(""), name)
    with pytest.raises(PreconditionFailed):
        write(at(FUNCTIONS, "access"), name, if_generation_match=0)
    with pytest.raises(Forbidden):
        write(at(SERVER), name, if_generation_match=0)


@pytest.mark.parametrize("caller", [TRAINER, SERVER])
def test_a_container_changes_no_bucket(at: Callable[..., storage.Client], caller: str) -> None:
    client = at(caller)
    for work in (
        lambda: client.bucket(RUNS).delete(retry=None),
        lambda: client.create_bucket(f"b-{uuid.uuid4().hex}", retry=None),
        lambda: list(client.list_buckets(retry=None)),
        lambda: client.bucket(RUNS).get_iam_policy(retry=None),
        lambda: client.bucket(SPECS).blob("specs/forged.json").upload_from_string("{}", retry=None),
        lambda: client.bucket(SPECS).blob("specs/any.json").download_as_bytes(retry=None),
    ):
        with pytest.raises(Forbidden):
            work()
    asked = ["storage.objects.get", "storage.objects.create", "storage.buckets.delete"]
    assert client.bucket(RUNS).test_iam_permissions(asked) == []


def test_the_owner_may_do_everything_with_or_without_a_token(at: Callable[..., storage.Client], server: Server) -> None:
    write(at(""), f"runs/{uuid.uuid4().hex}")
    owner, session = server.addresses("")[0], requests.Session()
    for token, status in ((IDENTITY.token("OAuth2", "scope"), 200), ("ya29.somebody-else", 401)):
        session.headers["Authorization"] = f"Bearer {token}"
        assert session.get(f"{owner}/storage/v1/b/{RUNS}", timeout=60).status_code == status
    session.headers["Authorization"] = f"Bearer {IDENTITY.token('OAuth2', 'scope', TRAINER)}"
    client = storage.Client("p", AnonymousCredentials(), _http=session, client_options={"api_endpoint": owner})
    with pytest.raises(Forbidden):
        write(client, "runs/by-token")
    session.headers["Authorization"] = "Bearer none"
    with pytest.raises(Unauthorized):
        write(client, "runs/by-token")
