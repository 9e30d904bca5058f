"""Evaluates small Terraform files: expressions, bindings, and what the reader refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dropforge_local.iam.hcl import HclError
from dropforge_local.iam.terraform import Binding, read_configuration

PROJECT = {"project_id": "p"}
VARIABLES = 'variable "project_id" {\n  type = string\n}\nlocals {\n  kubernetes_objects = []\n}\n'
BUCKET = 'resource "google_storage_bucket" "b" {\n  name = "${var.project_id}-b"\n}\n'


def read(directory: Path, text: str, **variables: Any) -> tuple[Binding, ...]:
    (directory / "main.tf").write_text(VARIABLES + text)
    return read_configuration(directory, PROJECT | variables).bindings


def values(directory: Path, expression: str) -> list[str]:
    """The items of a set that `expression` gives."""
    return [
        binding.role
        for binding in read(
            directory,
            'resource "google_project_iam_member" "m" {\n  for_each = '
            + expression
            + '\n  member = "user:u"\n  role = each.key\n}\n',
        )
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('["a", "b"]', ["a", "b"]),
        ('{ for k, v in { x = 1, y = 2 } : "${k}-${v + 1}" => v if v > 1 }', ["y-3"]),
        ('toset(concat(["a"], true ? ["b", "a"] : ["c"]))', ["a", "b"]),
        ("merge([for n in [1, 2] : { for m in [n * 10] : m => n }]...)", ["10", "20"]),
        ('[replace(upper("a-b"), "-", "_")]', ["A_B"]),
        ('[for s in split("/", "a/b") : s if s != "a" && !contains(["c"], s)]', ["b"]),
        ('[{ true = "yes", false = "no" }[1 == 2]]', ["no"]),
        ('can(local.missing) ? [] : ["fallback"]', ["fallback"]),
        ('["$${literal} \\"quoted\\""]', ['${literal} "quoted"']),
        ('[join(",", reverse(slice(["a", "b", "c"], 0, 2)))]', ["b,a"]),
        ('[\n  # a comment\n  "a", // another\n  "b" /* and\n  one */ ,\n]', ["a", "b"]),
    ],
)
def test_an_expression_has_terraforms_value(tmp_path: Path, expression: str, expected: list[str]) -> None:
    assert [str(value) for value in values(tmp_path, expression)] == expected


def test_a_condition_of_a_dynamic_block(tmp_path: Path) -> None:
    text = (
        BUCKET
        + """
resource "google_storage_bucket_iam_member" "m" {
  for_each = { open = "", shut = "resource.name.startsWith(\\"x\\")" }
  bucket   = google_storage_bucket.b.name
  role     = "roles/${each.key}"
  member   = "user:u"

  dynamic "condition" {
    for_each = each.value == "" ? [] : [each.value]
    content {
      title      = "t"
      expression = condition.value
    }
  }
}
"""
    )
    bucket = "projects/_/buckets/p-b"
    assert read(tmp_path, text) == (
        Binding("user:u", "roles/open", bucket),
        Binding("user:u", "roles/shut", bucket, 'resource.name.startsWith("x")'),
    )


def test_a_custom_role_and_an_account_have_googles_names(tmp_path: Path) -> None:
    text = """
resource "google_service_account" "a" {
  account_id = "name"
}
resource "google_project_iam_custom_role" "r" {
  role_id     = "role"
  permissions = ["run.jobs.get"]
}
resource "google_service_account_iam_member" "m" {
  service_account_id = google_service_account.a.name
  role               = google_project_iam_custom_role.r.id
  member             = google_service_account.a.member
}
"""
    email = "name@p.iam.gserviceaccount.com"
    resource = f"projects/p/serviceAccounts/{email}"
    assert read(tmp_path, text) == (Binding(f"serviceAccount:{email}", "projects/p/roles/role", resource),)
    assert read_configuration(tmp_path, PROJECT).roles == {"projects/p/roles/role": {"run.jobs.get"}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("locals {\n  a = <<EOT\n}\n", "main.tf: line 8"),
        ('resource "google_project_iam_member" "m" {\n  member = nowhere.x\n  role = "r"\n}\n', "'nowhere' is unknown"),
        ('resource "google_project_iam_member" "m" {\n  member = md5("x")\n  role = "r"\n}\n', "md5.. is unknown"),
        ('resource "google_project_iam_member" "m" {\n  member = var.gone\n  role = "r"\n}\n', "var.gone has no value"),
        ('resource "google_folder_iam_member" "m" {\n  member = "u"\n  role = "r"\n}\n', "google_folder_iam_member"),
    ],
)
def test_what_the_reader_does_not_know_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(HclError, match=problem):
        read(tmp_path, text)
