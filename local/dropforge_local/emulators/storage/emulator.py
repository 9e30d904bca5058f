"""The storage emulator as the local stack mounts it: the JSON API's roots, below one HTTP port."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Reply, Route, Router
from .batch import answer_batch
from .blobs import BlobStore
from .bucket_routes import BucketRoutes
from .buckets import Buckets
from .errors import StorageError, invalid, not_emulated
from .models import ObjectChange
from .notifications import Notifications, Topics
from .object_routes import ObjectRoutes
from .objects import Objects, OnChange
from .parts import Multiparts
from .permissions import guarded
from .resources import bucket_attributes
from .state import State
from .upload_routes import UploadRoutes
from .uploads import Uploads
from .wire import answer, read_body, read_target, refusal
from .xml_routes import XmlRoutes

# The API answers below both roots; links to media have the second root.
API_ROOTS = ("/storage/v1/", "/download/storage/v1/")
# google-cloud-storage uses the first root for resumable uploads too, gcloud the second.
UPLOAD_ROOTS = ("/upload/storage/v1/", "/resumable/upload/storage/v1/")
BATCH_PATH = "/batch/storage/v1"
_REFUSED_PARAMETERS = ("kmsKeyName", "destinationKmsKeyName", "restoreToken")
_REFUSED_HEADERS = ("X-Goog-Encryption-Key", "X-Goog-Encryption-Algorithm", "X-Goog-Copy-Source-Encryption-Key")


class StorageEmulator(PassiveEmulator):
    """Cloud Storage's JSON API, and multipart uploads of its XML API, on a database and a directory of blobs.

    `on_change` is called inside the transaction that changes an object, so that its writes to the same database are
    committed with the change or not at all. The emulator stores lifecycle rules, CORS and IAM policies but does not
    act on them. `topics` receive notifications. It answers 501 to folders, HMAC keys, encryption keys and
    soft delete.
    """

    def __init__(
        self,
        db: Database,
        blob_dir: Path,
        clock: Clock,
        on_change: OnChange | None = None,
        project: str = "local-project",
        topics: Topics | None = None,
    ) -> None:
        blobs = BlobStore(db, blob_dir)
        buckets = Buckets(db, clock)
        notifications = Notifications(db, buckets, topics)
        listeners = [notifications.publish, *([on_change] if on_change else [])]
        objects = Objects(db, clock, buckets, blobs, partial(_tell, listeners))
        self._state = State(db, blobs, buckets, objects, Uploads(db, clock), project)
        self._xml = XmlRoutes(self._state, Multiparts(db, clock, blobs))
        # Not in start(): at that time the port is bound, and a first upload may have written its blob already.
        blobs.sweep(_blobs_in_use(db))
        self._router = Router(
            [
                *_below(UPLOAD_ROOTS, UploadRoutes(self._state).routes()),
                *_below(
                    API_ROOTS,
                    [
                        *ObjectRoutes(self._state).routes(),
                        *BucketRoutes(self._state).routes(),
                        *notifications.routes(),
                    ],
                ),
                Route("POST", BATCH_PATH, partial(answer_batch, self._answer)),
            ]
        )

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        # [\s\S] also matches a quoted line feed: the emulator refuses it as part of an object name, not of the path.
        everything = [web.route("*", root + r"{path:[\s\S]*}", self._serve) for root in (*API_ROOTS, *UPLOAD_ROOTS)]
        return [*everything, web.post(BATCH_PATH, self._serve), *self._xml.routes()]

    async def stop(self) -> None:
        self._state.blobs.close()

    def create_bucket(self, name: str, location: str = "US-CENTRAL1") -> None:
        """Create a bucket unless it exists, for the stack's own set-up."""
        if not self._state.buckets.exists(name):
            self._state.buckets.create(name, bucket_attributes({"location": location}))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            reply = await self._answer(await _read_call(request))
        except StorageError as error:
            reply = refusal(error)
        except web.RequestPayloadError as error:
            reply = refusal(invalid(f"The body is malformed: {error}", "badRequest"))
        except ConnectionError:
            reply = Reply(status=499)  # the client hung up during its upload and reads no answer
        return reply.response() if isinstance(reply, Reply) else reply

    async def _answer(self, call: Call) -> Reply | web.StreamResponse:
        _refuse_not_emulated(call)
        if call.request is None and not call.path.startswith(API_ROOTS):
            raise invalid(f"{call.path!r} is not supported inside a batch; expected a path below {API_ROOTS[0]}")
        return await answer(self._router, call)


def _tell(listeners: Sequence[OnChange], change: ObjectChange) -> None:
    for listener in listeners:
        listener(change)


def _below(roots: Sequence[str], routes: Sequence[Route]) -> list[Route]:
    """The routes below each root, with the check of what they need."""
    checked = [guarded(route) for route in routes]
    return [Route(route.verb, root + route.path, route.handler) for root in roots for route in checked]


async def _read_call(request: web.Request) -> Call:
    """The call in a request; the body of an upload stays a stream."""
    path, query = read_target(request.raw_path)
    streamed = request.path.startswith(UPLOAD_ROOTS)
    body = b"" if streamed or not request.body_exists else await read_body(request.content)
    return Call(request.method, path, query, request.headers, f"{request.scheme}://{request.host}", body, request)


def _refuse_not_emulated(call: Call) -> None:
    for name in _REFUSED_PARAMETERS:
        if name in call.query:
            raise not_emulated(f"the parameter {name!r}")
    for name in _REFUSED_HEADERS:
        if name in call.headers:
            raise not_emulated(f"the header {name!r}")


def _blobs_in_use(db: Database) -> set[str]:
    query = (
        "SELECT blob FROM storage_objects UNION SELECT blob FROM storage_uploads WHERE blob IS NOT NULL "
        "UNION SELECT blob FROM storage_parts"
    )
    return {row[0] for row in db.connection.execute(query)}
