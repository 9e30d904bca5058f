"""The storage emulator as the local stack mounts it: the JSON API's roots, below one HTTP port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .batch import answer_batch
from .blobs import BlobStore
from .bucket_routes import BucketRoutes
from .buckets import Buckets
from .errors import StorageError, invalid, not_emulated
from .object_routes import ObjectRoutes
from .objects import Objects, OnChange
from .resources import bucket_attributes
from .state import State
from .upload_routes import UploadRoutes
from .uploads import Uploads
from .wire import Call, Reply, Router, read_body, read_target, refusal, to_response

API_ROOT = "/storage/v1/"
DOWNLOAD_ROOT = "/download/storage/v1/"
# google-cloud-storage uses the first root for resumable uploads too, gcloud the second.
UPLOAD_ROOTS = ("/upload/storage/v1/", "/resumable/upload/storage/v1/")
BATCH_PATH = "/batch/storage/v1"
_REFUSED_PARAMETERS = ("kmsKeyName", "destinationKmsKeyName", "restoreToken")
_REFUSED_HEADERS = ("X-Goog-Encryption-Key", "X-Goog-Encryption-Algorithm", "X-Goog-Copy-Source-Encryption-Key")


class StorageEmulator:
    """Cloud Storage's JSON API on a database and a directory of blobs.

    `on_change` is called inside the transaction that changes an object, so that what it writes to the same database
    is committed with the change or not at all. Kept but not acted on: lifecycle rules, CORS, IAM policies. Answered
    with 501, saying so: notificationConfigs, folders, HMAC keys, holds and retention, encryption keys, soft delete.
    """

    def __init__(
        self,
        db: Database,
        blob_dir: Path,
        clock: Clock,
        on_change: OnChange | None = None,
        project: str = "local-project",
    ) -> None:
        blobs = BlobStore(db, blob_dir)
        buckets = Buckets(db, clock)
        objects = Objects(db, clock, buckets, blobs, on_change)
        self._state = State(db, blobs, buckets, objects, Uploads(db, clock), project)
        # Here and not in start(): by then the port is bound, and a first upload may have written its blob already.
        blobs.sweep(_blobs_in_use(db))
        self._api = Router([*BucketRoutes(self._state).routes(), *ObjectRoutes(self._state).routes()])
        self._uploads = Router(UploadRoutes(self._state).routes())

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        roots = (API_ROOT, DOWNLOAD_ROOT, *UPLOAD_ROOTS)
        # [\s\S] also takes a quoted line feed, which is to be refused as an object name and not as a path.
        return [web.route("*", root + r"{path:[\s\S]*}", self._serve) for root in roots] + [
            web.post(BATCH_PATH, self._serve_batch)
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        """Nothing runs in the background."""

    async def stop(self) -> None:
        self._state.blobs.close()

    def create_bucket(self, name: str, location: str = "US-CENTRAL1") -> None:
        """Make a bucket unless it exists, for the stack's own set-up."""
        if not self._state.buckets.exists(name):
            self._state.buckets.create(name, bucket_attributes({"location": location}))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return to_response(await self._answer_request(request))
        except StorageError as error:
            return to_response(refusal(error))
        except web.RequestPayloadError as error:
            return to_response(refusal(invalid(f"The body is malformed: {error}", "badRequest")))
        except ConnectionError:
            # The client hung up in the middle; nobody reads this answer.
            return to_response(Reply(status=499))

    async def _serve_batch(self, request: web.Request) -> web.StreamResponse:
        call = await _read_call(request, streamed=False)
        try:
            return await answer_batch(call, self._answer)
        except StorageError as error:
            return to_response(refusal(error))

    async def _answer_request(self, request: web.Request) -> Reply | web.StreamResponse:
        streamed = request.path.startswith(UPLOAD_ROOTS)
        return await self._answer(await _read_call(request, streamed))

    async def _answer(self, call: Call) -> Reply | web.StreamResponse:
        _refuse_not_emulated(call)
        for root in UPLOAD_ROOTS:
            if call.path.startswith(root):
                if call.request is None:
                    raise invalid("Uploads are not supported inside a batch request")
                return await self._uploads.answer(replace(call, path=call.path.removeprefix(root)))
        for root in (API_ROOT, DOWNLOAD_ROOT):
            if call.path.startswith(root):
                return await self._api.answer(replace(call, path=call.path.removeprefix(root)))
        raise invalid(f"Invalid path {call.path!r}; expected one below {API_ROOT}")


async def _read_call(request: web.Request, streamed: bool) -> Call:
    path, query = read_target(request.raw_path)
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
    query = "SELECT blob FROM storage_objects UNION SELECT blob FROM storage_uploads WHERE blob IS NOT NULL"
    return {row[0] for row in db.connection.execute(query)}
