"""The IAM policies of secrets. They are kept and have no effect: the bindings of `terraform/` decide.

https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets/setIamPolicy
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

from google.iam.v1 import iam_policy_pb2, policy_pb2

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.iam.policy import current

from ..kit.rpc import Message, methods

SCHEMA = """
CREATE TABLE IF NOT EXISTS secretmanager_policies (
    secret TEXT PRIMARY KEY, policy BLOB NOT NULL);
"""
TYPES = SimpleNamespace(
    GetIamPolicyRequest=iam_policy_pb2.GetIamPolicyRequest,
    SetIamPolicyRequest=iam_policy_pb2.SetIamPolicyRequest,
    TestIamPermissionsRequest=iam_policy_pb2.TestIamPermissionsRequest,
    TestIamPermissionsResponse=iam_policy_pb2.TestIamPermissionsResponse,
    Policy=policy_pb2.Policy,
)
METHODS = methods(
    TYPES,
    """
    GetIamPolicy() Policy GET /v1/{resource=projects/*/secrets/*}:getIamPolicy
    SetIamPolicy() Policy POST /v1/{resource=projects/*/secrets/*}:setIamPolicy *
    TestIamPermissions() TestIamPermissionsResponse POST /v1/{resource=projects/*/secrets/*}:testIamPermissions *
    """,
)
VERSIONS = (0, 1, 3)


class Policies:
    """The policies by the name of their secret."""

    def __init__(self, db: Database) -> None:
        self._db = db
        db.connection.executescript(SCHEMA)

    def get(self, secret: str) -> Message:
        """The policy; its etag changes with its content, so that a read-modify-write is safe."""
        row = self._db.row("SELECT policy FROM secretmanager_policies WHERE secret = ?", (secret,))
        policy = policy_pb2.Policy.FromString(row["policy"]) if row else policy_pb2.Policy(version=1)
        policy.etag = hashlib.sha256(policy.SerializeToString(deterministic=True)).digest()[:8]
        return policy

    def set(self, secret: str, policy: Message) -> Message:
        _check(policy)
        with self._db.transaction() as connection:
            if policy.etag and policy.etag != self.get(secret).etag:
                raise ApiError("ABORTED", "There were concurrent policy changes. Read the policy again, and retry.")
            policy.ClearField("etag")
            policy.version = policy.version or 1
            row = (secret, policy.SerializeToString(deterministic=True))
            connection.execute("INSERT OR REPLACE INTO secretmanager_policies VALUES (?, ?)", row)
        return self.get(secret)


def granted(secret: str, permissions: list[str]) -> list[str]:
    """Those of the permissions that the account of this request has on a secret."""
    account = current.get()
    return [name for name in permissions if account is None or account.may(name, secret)]


def _check(policy: Message) -> None:
    if policy.version not in VERSIONS:
        raise ApiError("INVALID_ARGUMENT", f"policy.version is {policy.version}; expected 1 or 3")
    for binding in policy.bindings:
        if not binding.role.startswith(("roles/", "projects/", "organizations/")) or not binding.members:
            problem = f"role {binding.role!r} with {len(binding.members)} members; expected roles/... and a member"
            raise ApiError("INVALID_ARGUMENT", f"policy.bindings has {problem}")
