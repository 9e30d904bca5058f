"""b, b/{bucket}, IAM: the JSON API's methods on buckets."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from .errors import StorageError, invalid
from .models import Bucket, Edit
from .preconditions import Preconditions, parse_int64
from .resources import bucket_attributes, bucket_json
from .state import State
from .wire import Call, Reply, Route

MAX_RESULTS = 1000


class BucketRoutes:
    """Handlers for buckets."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._buckets = state.buckets

    def routes(self) -> list[Route]:
        return [
            ("GET", "b", self.list),
            ("POST", "b", self.insert),
            ("GET", "b/{bucket}", self.get),
            ("PATCH", "b/{bucket}", self.patch),
            ("PUT", "b/{bucket}", self.update),
            ("DELETE", "b/{bucket}", self.delete),
            ("GET", "b/{bucket}/iam", self.get_policy),
            ("PUT", "b/{bucket}/iam", self.set_policy),
            ("GET", "b/{bucket}/iam/testPermissions", self.test_permissions),
            ("GET", "b/{bucket}/storageLayout", self.storage_layout),
            ("GET", "b/{bucket}/managedFolders", self.list_managed_folders),
            ("GET", "projects/{project}/serviceAccount", self.service_account),
            *((method, path, self.refuse_acl) for method in _ACL_METHODS for path in _ACL_PATHS),
        ]

    async def insert(self, call: Call) -> Reply:
        if not call.query.get("project"):
            raise invalid("Required parameter: project", "required")
        body = call.json()
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
        after = _name_from_token(call.query.get("pageToken", ""))
        buckets = self._buckets.list(call.query.get("prefix", ""), after, limit + 1)
        body: dict[str, Any] = {"kind": "storage#buckets"}
        if buckets:
            body["items"] = [self._json(call, bucket) for bucket in buckets[:limit]]
        if len(buckets) > limit:
            body["nextPageToken"] = base64.urlsafe_b64encode(buckets[limit - 1].name.encode()).decode()
        return Reply(body)

    async def patch(self, call: Call) -> Reply:
        body = call.json()
        return self._change(call, lambda old: bucket_attributes(body, old))

    async def update(self, call: Call) -> Reply:
        body = call.json()
        return self._change(call, lambda old: bucket_attributes(body, {"location": old["location"]}))

    async def delete(self, call: Call) -> Reply:
        self._buckets.delete(call.names["bucket"], Preconditions.from_query(call.query))
        return Reply(status=204)

    async def get_policy(self, call: Call) -> Reply:
        return Reply(self._buckets.policy(call.names["bucket"]))

    async def set_policy(self, call: Call) -> Reply:
        return Reply(self._buckets.set_policy(call.names["bucket"], call.json()))

    async def test_permissions(self, call: Call) -> Reply:
        """Whoever calls the local stack owns it: every permission that exists is granted."""
        self._buckets.get(call.names["bucket"])
        permissions = call.query.getall("permissions", [])
        if not permissions:
            raise invalid("Required parameter: permissions", "required")
        for permission in permissions:
            if not permission.startswith("storage."):
                raise invalid(f"Invalid permission: {permission!r}; expected one such as 'storage.objects.get'")
        return Reply({"kind": "storage#testIamPermissionsResponse", "permissions": permissions})

    async def storage_layout(self, call: Call) -> Reply:
        bucket = self._json(call, self._buckets.get(call.names["bucket"]))
        layout = {"kind": "storage#storageLayout", "bucket": bucket["name"]}
        return Reply(layout | {name: bucket[name] for name in ("location", "locationType")})

    async def list_managed_folders(self, call: Call) -> Reply:
        """There are none, as they cannot be made here; `gcloud storage rm -r` asks."""
        self._buckets.get(call.names["bucket"])
        return Reply({"kind": "storage#managedFolders"})

    async def service_account(self, call: Call) -> Reply:
        address = f"service-{self._state.project_number}@gs-project-accounts.iam.gserviceaccount.com"
        return Reply({"kind": "storage#serviceAccount", "email_address": address})

    async def refuse_acl(self, call: Call) -> Reply:
        """Buckets of the local stack have uniform bucket-level access, with which Google refuses ACLs as well."""
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


def max_results(call: Call) -> int:
    """maxResults, at most 1,000; absent and 0 mean that."""
    limit = parse_int64(call.query.get("maxResults", "0"), "maxResults")
    if limit < 0:
        raise invalid(f"Invalid value for maxResults: {limit}; expected 0 to {MAX_RESULTS}", "invalidParameter")
    return min(limit or MAX_RESULTS, MAX_RESULTS)


def _name_from_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"Invalid pageToken: {token!r}; expected the nextPageToken of an earlier page") from None
