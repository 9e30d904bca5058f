from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.base import names

RUN = names.run_id_of_object("specs-bucket", "specs/team/My Job (v2).json", 1234567890123456)


@pytest.mark.parametrize(
    ("uri", "parts"),
    [("gs://b/a/c", ("b", "a/c")), ("gs://b", ("b", "")), ("gs://b//a", ("b", "/a")), ("gs://b/a\nc", ("b", "a\nc"))],
)
def test_a_gs_uri_has_a_bucket_and_a_path(uri: str, parts: tuple[str, str]) -> None:
    assert names.parse_gs_uri(uri) == parts


@pytest.mark.parametrize("uri", ["s3://b/x", "gs:/b/x", "b/x", "gs://"])
def test_only_gs_uris_are_parsed(uri: str) -> None:
    with pytest.raises(ValueError, match="expected gs://bucket/path"):
        names.parse_gs_uri(uri)


def test_run_id_is_a_function_of_bucket_object_and_generation() -> None:
    second_id = names.run_id_of_object("specs-bucket", "specs/team/My Job (v2).json", "1234567890123456")
    assert second_id == RUN
    assert RUN.startswith("my-job-v2-")


@pytest.mark.parametrize("change", [("b", "specs/a.json", 1), ("a", "specs/b.json", 1), ("a", "specs/a.json", 2)])
def test_another_object_or_generation_gives_another_run_id(change: tuple[str, str, int]) -> None:
    assert names.run_id_of_object(*change) != names.run_id_of_object("a", "specs/a.json", 1)


@given(st.text(max_size=300), st.integers(min_value=0, max_value=2**63 - 1))
def test_names_derived_from_any_object_keep_the_length_limits(name: str, generation: int) -> None:
    run = names.run_id_of_object("bucket", f"specs/{name}.json", generation)
    assert names.is_run_id(run)
    assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", names.endpoint_name(run))
    assert len(names.endpoint_name(run)) < 50
    assert len(names.training_name(run, 999) + "-t999") < 63


def test_a_message_id_gives_a_run_id() -> None:
    assert names.is_run_id(names.run_id_of_message("any key: ünïcode"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("specs/a.json", True),
        ("specs/team/b.json", True),
        ("specs/a.txt", False),
        ("other/a.json", False),
        ("a.json", False),
    ],
)
def test_only_a_json_object_below_specs_is_a_spec(name: str, expected: bool) -> None:
    assert names.is_spec_object(name) is expected


@pytest.mark.parametrize("text", ["", "../x-0123456789ab", "run-0123456789AB", "run", "x" * 40, "run-0123456789ab/.."])
def test_a_malformed_run_id_is_refused(text: str) -> None:
    assert not names.is_run_id(text)


def test_events_sort_by_attempt_then_sequence() -> None:
    order = [(1, 5), (1, 40), (2, 3), (10, 1)]
    keys = [names.event_object("r", attempt, sequence, "progress") for attempt, sequence in order]
    assert keys == sorted(keys)


def test_the_name_distinguishes_an_endpoint_from_a_training_job() -> None:
    services = "projects/p/locations/r/clusters/c/k8s/namespaces/n/services"
    assert names.is_endpoint(f"{services}/{names.endpoint_name(RUN)}", RUN)
    assert not names.is_endpoint(
        f"{services}/{names.training_name(RUN, 1)}", RUN
    )  # the headless service of the training pods
    assert not names.is_endpoint(f"{services}/{names.endpoint_name('other-0123456789ab')}", RUN)


def test_the_names_of_an_endpoint_s_parts_are_no_other_endpoint_s() -> None:
    names_of_a = {names.named_endpoint("a"), *(names.named_revision("a", number) for number in (1, 12))}
    assert all(names.is_of_endpoint(f"x/{name}", "a") for name in names_of_a)
    for other in ("a-r1", "r1-a", "b", "a-a"):
        assert not any(names.is_of_endpoint(f"x/{name}", other) for name in names_of_a)
        assert not names_of_a & {names.named_endpoint(other), names.named_revision(other, 1)}
    assert names.revision_number(f"x/{names.named_revision('a', 12)}", "a") == 12
    assert names.revision_number(f"x/{names.named_endpoint('a')}", "a") is None


@pytest.mark.parametrize(("secret", "version"), [("hf-token", "latest"), ("hf-token:", "latest"), ("hf-token:3", "3")])
def test_a_secret_without_a_version_means_the_latest_version(secret: str, version: str) -> None:
    assert names.secret_version("p1", secret) == f"projects/p1/secrets/hf-token/versions/{version}"
