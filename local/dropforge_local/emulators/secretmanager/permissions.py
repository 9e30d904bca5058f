"""The permission that each method needs: https://cloud.google.com/secret-manager/docs/access-control (2026-11-23)."""

from __future__ import annotations

from ..kit import access

NEEDS = access.table(
    """
    list_secrets secretmanager.secrets.list -
    create_secret secretmanager.secrets.create -
    get_secret secretmanager.secrets.get name
    update_secret secretmanager.secrets.update secret.name
    delete_secret secretmanager.secrets.delete name
    add_secret_version secretmanager.versions.add parent
    list_secret_versions secretmanager.versions.list parent
    get_secret_version secretmanager.versions.get name
    access_secret_version secretmanager.versions.access name
    enable_secret_version secretmanager.versions.enable name
    disable_secret_version secretmanager.versions.disable name
    get_iam_policy secretmanager.secrets.getIamPolicy resource
    set_iam_policy secretmanager.secrets.setIamPolicy resource
    test_iam_permissions
    destroy_secret_version secretmanager.versions.destroy name
    """
)
