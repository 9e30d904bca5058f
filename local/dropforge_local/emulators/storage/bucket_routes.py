"""b, b/{bucket}, IAM: the JSON API's methods on buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..kit.paging import cut
from ..kit.routing import Call, Reply, Route
from .errors import StorageError, invalid
from .models import Attributes, Bucket, Edit
from .permissions import granted
from .preconditions import Preconditions, parse_int64
from .resources import bucket_attributes, bucket_json
from .retention import locked
from .state import State
from .wire import parse_json, read_token

MAX_RESULTS = 1000


class BucketRoutes:
    """Handlers for buckets."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._buckets = state.buckets

    def routes(self) -> list[Route]:
        return [
            Route("GET", "b", self.list),
            Route("POST", "b", self.insert),
            Route("GET", "b/{bucket}", self.get),
            Route("PATCH", "b/{bucket}", self.patch),
            Route("PUT", "b/{bucket}", self.update),
            Route("DELETE", "b/{bucket}", self.delete),
            Route("GET", "b/{bucket}/iam", self.get_policy),
            Route("PUT", "b/{bucket}/iam", self.set_policy),
            Route("GET", "b/{bucket}/iam/testPermissions", self.test_permissions),
            Route("POST", "b/{bucket}/lockRetentionPolicy", self.lock_retention_policy),
            Route("GET", "b/{bucket}/storageLayout", self.storage_layout),
            Route("GET", "b/{bucket}/managedFolders", self.list_managed_folders),
            Route("GET", "projects/{project}/serviceAccount", self.service_account),
            *(Route(method, path, self.refuse_acl) for method in _ACL_METHODS for path in _ACL_PATHS),
        ]

    async def insert(self, call: Call) -> Reply:
        if not call.query.get("project"):
            raise invalid("Required parameter: project", "required")
        body = parse_json(call.body)
        name = body.get("name")
        if not isinstance(name, str):
            raise invalid(f"Invalid bucket name: {name!r}; expected a string", "required")
        return self._reply(call, self._buckets.create(name, bucket_attributes(body)))

    async def get(self, call: Call) -> Reply:
        preconditions = Preconditions.of_read(call.query, call.headers)
        return self._reply(call, self._buckets.get(call.names["bucket"], preconditions))

    async def list(self, call: Call) -> Reply:
        if not call.query.get("project"):
            raise invalid("Required parameter: project", "required")
        limit = max_results(call)
        [after] = read_token(call.query, "")
        rows = self._buckets.list(call.query.get("prefix", ""), after, limit + 1)
        buckets, token = cut(rows, limit, lambda bucket: [bucket.name])
        return listing("storage#buckets", [self._json(call, bucket) for bucket in buckets], token)

    async def patch(self, call: Call) -> Reply:
        body = parse_json(call.body)
        return self._change(call, lambda old: bucket_attributes(body, old))

    async def update(self, call: Call) -> Reply:
        body = parse_json(call.body)
        return self._change(call, lambda old: bucket_attributes({"retentionPolicy": None} | body, _fixed(old)))

    async def lock_retention_policy(self, call: Call) -> Reply:
        if not call.query.get("ifMetagenerationMatch"):
            raise invalid("Required parameter: ifMetagenerationMatch", "required")
        return self._change(call, locked)

    async def delete(self, call: Call) -> Reply:
        self._buckets.delete(call.names["bucket"], Preconditions.from_query(call.query))
        return Reply(status=204)

    async def get_policy(self, call: Call) -> Reply:
        return Reply(self._buckets.policy(call.names["bucket"]))

    async def set_policy(self, call: Call) -> Reply:
        return Reply(self._buckets.set_policy(call.names["bucket"], parse_json(call.body)))

    async def test_permissions(self, call: Call) -> Reply:
        self._buckets.get(call.names["bucket"])
        permissions = call.query.getall("permissions", [])
        if not permissions:
            raise invalid("Required parameter: permissions", "required")
        for permission in permissions:
            if not permission.startswith("storage."):
                raise invalid(f"Invalid permission: {permission!r}; expected one such as 'storage.objects.get'")
        return Reply(
            {"kind": "storage#testIamPermissionsResponse", "permissions": granted(permissions, call.names["bucket"])}
        )

    async def storage_layout(self, call: Call) -> Reply:
        bucket = self._json(call, self._buckets.get(call.names["bucket"]))
        layout = {"kind": "storage#storageLayout", "bucket": bucket["name"]}
        return Reply(layout | {name: bucket[name] for name in ("location", "locationType")})

    async def list_managed_folders(self, call: Call) -> Reply:
        """An empty list, since the local stack cannot create managed folders; `gcloud storage rm -r` reads the list."""
        self._buckets.get(call.names["bucket"])
        return Reply({"kind": "storage#managedFolders"})

    async def service_account(self, call: Call) -> Reply:
        address = f"service-{self._state.project_number}@gs-project-accounts.iam.gserviceaccount.com"
        return Reply({"kind": "storage#serviceAccount", "email_address": address})

    async def refuse_acl(self, call: Call) -> Reply:
        """Refuse, as Google does for buckets with uniform bucket-level access, which every local bucket has."""
        self._buckets.get(call.names["bucket"])
        raise StorageError(
            400,
            "invalid",
            "Cannot use the ACL API when uniform bucket-level access is enabled, as it is on every bucket of the "
            "local stack; set IAM policies on the bucket instead",
        )

    def _change(self, call: Call, edit: Edit) -> Reply:
        preconditions = Preconditions.from_query(call.query)
        return self._reply(call, self._buckets.change(call.names["bucket"], preconditions, edit))

    def _reply(self, call: Call, bucket: Bucket) -> Reply:
        return Reply(self._json(call, bucket))

    def _json(self, call: Call, bucket: Bucket) -> dict[str, Any]:
        return bucket_json(bucket, call.base_url, self._state.project_number)


_ACL_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_ACL_PATHS = (
    "b/{bucket}/acl",
    "b/{bucket}/acl/{entity}",
    "b/{bucket}/defaultObjectAcl",
    "b/{bucket}/defaultObjectAcl/{entity}",
    "b/{bucket}/o/{object}/acl",
    "b/{bucket}/o/{object}/acl/{entity}",
)


def _fixed(attributes: Attributes) -> Attributes:
    """What an update cannot leave out: the location, and a retention policy, which may be locked."""
    return {name: attributes[name] for name in ("location", "retentionPolicy") if name in attributes}


def max_results(call: Call) -> int:
    """maxResults, at most 1,000. The default and 0 are 1,000."""
    limit = parse_int64(call.query.get("maxResults", "0"), "maxResults")
    if limit < 0:
        raise invalid(f"Invalid value for maxResults: {limit}; expected 0 to {MAX_RESULTS}", "invalidParameter")
    return min(limit or MAX_RESULTS, MAX_RESULTS)


def listing(kind: str, items: Sequence[dict[str, Any]], token: str, **more: Any) -> Reply:
    """A page of a list; empty parts are left out."""
    body = {"items": items, **more, "nextPageToken": token}
    return Reply({"kind": kind} | {name: part for name, part in body.items() if part})
