"""The permission that each method of the JSON API needs (https://cloud.google.com/storage/docs/access-control/iam-json),
and Cloud Storage's refusal.

A write needs storage.objects.create, and storage.objects.delete where it replaces an object: objects.py checks these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from dropforge_local.iam.policy import current

from ..kit.routing import Call, Reply, Route
from .errors import StorageError

PROJECT, BUCKET, OBJECT, SOURCE = "project", "bucket", "object", "source_object"
LIST_PREFIX = "storage.googleapis.com/objectListPrefix"
# By handler: permissions, each with the part of the path that it is about.
NEEDED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "BucketRoutes.insert": (("storage.buckets.create", PROJECT),),
    "BucketRoutes.get": (("storage.buckets.get", BUCKET),),
    "BucketRoutes.list": (("storage.buckets.list", PROJECT),),
    "BucketRoutes.patch": (("storage.buckets.update", BUCKET),),
    "BucketRoutes.lock_retention_policy": (("storage.buckets.update", BUCKET),),
    "BucketRoutes.update": (("storage.buckets.update", BUCKET),),
    "BucketRoutes.delete": (("storage.buckets.delete", BUCKET),),
    "BucketRoutes.get_policy": (("storage.buckets.getIamPolicy", BUCKET),),
    "BucketRoutes.set_policy": (("storage.buckets.setIamPolicy", BUCKET),),
    "BucketRoutes.test_permissions": (),
    "BucketRoutes.storage_layout": (("storage.objects.list", BUCKET),),
    "BucketRoutes.list_managed_folders": (("storage.managedFolders.list", BUCKET),),
    "BucketRoutes.service_account": (("resourcemanager.projects.get", PROJECT),),
    "BucketRoutes.refuse_acl": (("storage.buckets.getIamPolicy", BUCKET),),
    "Notifications.list": (("storage.buckets.get", BUCKET),),
    "Notifications.get": (("storage.buckets.get", BUCKET),),
    "Notifications.insert": (("storage.buckets.update", BUCKET),),
    "Notifications.delete": (("storage.buckets.update", BUCKET),),
    "ObjectRoutes.list": (("storage.objects.list", BUCKET),),
    "ObjectRoutes.insert_without_media": (),
    "ObjectRoutes.get": (("storage.objects.get", OBJECT),),
    "ObjectRoutes.patch": (("storage.objects.get", OBJECT), ("storage.objects.update", OBJECT)),
    "ObjectRoutes.update": (("storage.objects.update", OBJECT),),
    "ObjectRoutes.delete": (("storage.objects.delete", OBJECT),),
    "ObjectRoutes.compose": (),  # each source: see `_compose_source`
    "ObjectRoutes.copy": (("storage.objects.get", SOURCE),),
    "ObjectRoutes.rewrite": (("storage.objects.get", SOURCE),),
    "ObjectRoutes.move": (("storage.objects.move", SOURCE),),
    # https://cloud.google.com/storage/docs/access-control/iam-xml
    "XmlRoutes.initiate": (("storage.multipartUploads.create", OBJECT), ("storage.objects.create", OBJECT)),
    "XmlRoutes.upload_part": (("storage.multipartUploads.create", OBJECT), ("storage.objects.create", OBJECT)),
    "XmlRoutes.complete": (("storage.multipartUploads.create", OBJECT), ("storage.objects.create", OBJECT)),
    "XmlRoutes.abort": (("storage.multipartUploads.abort", OBJECT),),
    "XmlRoutes.list_parts": (("storage.multipartUploads.listParts", OBJECT),),
    "XmlRoutes.list_uploads": (("storage.multipartUploads.list", BUCKET),),
    "UploadRoutes.insert": (),
    # The URI of a resumable session is its own credential.
    "UploadRoutes.resume": (),
    "UploadRoutes.cancel": (),
}
Handler = Callable[[Call], Awaitable[Any]]


def guarded(route: Route) -> Route:
    """The route with a check of what its handler needs. Raises KeyError for a handler without an entry."""
    needed, handler = NEEDED[route.handler.__qualname__], route.handler
    if not needed:
        return route

    async def serve(call: Call) -> Reply:
        if current.get() is not None:
            for permission, part in needed:
                _require(permission, call.names, part, call.text("prefix"))
        reply: Reply = await handler(call)
        return reply

    return replace(route, handler=serve)


def require_object(permission: str, bucket: str, name: str) -> None:
    """Raises 403 unless the account of this request has the permission on an object."""
    require(permission, f"projects/_/buckets/{bucket}/objects/{name}", "Google Cloud Storage object")


def require(permission: str, resource: str, kind: str, attributes: Mapping[str, Any] | None = None) -> None:
    account = current.get()
    if account is None or account.may(permission, resource, attributes):
        return
    raise StorageError(
        403,
        "forbidden",
        f"{account.email} does not have {permission} access to the {kind}. Permission '{permission}' denied on "
        f"resource {resource or 'of the project'!r} (or it may not exist).{account.notes(permission, resource)}",
    )


def granted(permissions: list[str], bucket: str) -> list[str]:
    """Those of the permissions that the account of this request has on a bucket."""
    account = current.get()
    return [name for name in permissions if account is None or account.may(name, f"projects/_/buckets/{bucket}")]


def _require(permission: str, names: Mapping[str, str], part: str, prefix: str) -> None:
    if part == PROJECT:
        require(permission, "", "project")
    elif part == BUCKET:
        bucket = f"projects/_/buckets/{names['bucket']}"
        require(permission, bucket, "Google Cloud Storage bucket", {LIST_PREFIX: prefix})
    else:
        bucket = names.get("source_bucket", names["bucket"]) if part == SOURCE else names["bucket"]
        require_object(permission, bucket, names[part])
