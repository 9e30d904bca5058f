"""An invalid spec starts nothing; its problems are stored with the run, and Slack reports the rejection."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import NotFound
from dropforge.run.record import RunState

from ..deployments import clients
from .conftest import User

PLACEMENT = [{"region": "us-central1"}]
CASES: list[tuple[str, Any, str, str]] = [
    ("not JSON", b"{oops", "", "not JSON"),
    ("empty", b"", "", "it is empty"),
    ("wrong encoding", b'{"name": "\xff"}', "", "not UTF-8"),
    ("ten megabytes", b" " * 10_000_000, "", "too large"),
    ("a list", b"[]", "", "JSON object"),
    ("unknown field", {"modle": 1}, "/modle", "unknown field"),
    ("wrong type", {"training": {"epochs": "3"}}, "/training/epochs", "wrong type"),
    ("unknown target", {"target": {"type": "mars", "placements": PLACEMENT}}, "/target/type", "unknown value"),
    ("unknown region", {"target": {"type": "cloud_run", "placements": [{"region": "us-west9"}]}},
     "/target/placements/0/region", "does not offer"),
    ("unknown GPU", {"target": {"type": "cloud_run", "accelerator": "nvidia-b200", "placements": PLACEMENT}},
     "/target/accelerator", "does not offer"),
    ("a literal token", {"model": {"source": "hf_abcdefghijklmnopqrstuvwxyz"}}, "/model/source", "credential"),
    ("unknown secret", {"secrets": {"HF_TOKEN": "no-such-secret"}}, "/secrets/HF_TOKEN", "secret does not exist"),
    ("missing object", {"dataset": {"source": "gs://local-project-dropforge-runs/none.jsonl"}},
     "/dataset/source", "object does not exist"),
    ("missing bucket", {"dataset": {"source": "gs://no-such-bucket-here/none.jsonl"}},
     "/dataset/source", "bucket does not exist"),
    ("impossible bucket name", {"dataset": {"source": "gs://a..b/none.jsonl"}}, "/dataset/source", "bucket does not"),
    ("impossible secret version", {"secrets": {"T": f"slack-webhook:{'9' * 30}"}}, "/secrets/T", "not exist"),
    ("reserved variable", {"secrets": {"DROPFORGE_RUN": "slack-webhook"}}, "/secrets/DROPFORGE_RUN", "decides how"),
    ("too short", {"limits": {"max_duration": "119s"}}, "/limits/max_duration", "too short"),
    ("an infinite number", b'{"training": {"epochs": 1e999}}', "/training/epochs", "wrong"),
    ("a number of 5,000 digits", b'{"name": ' + b"9" * 5000 + b"}", "/name", "wrong type"),
    ("thousands of unknown fields", {f"k{n}": 1 for n in range(20_000)}, "", "more problems"),
    ("code of the model", {"model": {"source": "gs://local-data/tiny-gemma3", "trust_remote_code": True}},
     "/model/trust_remote_code", "trust_remote_code` of the deployment's policy"),
    ("does not fit", {"model": {"source": "meta-llama/Llama-3.1-70B"}}, "/model/source", "does not fit"),
    ("budget without price", {"target": {"type": "cloud_run", "placements": [{"region": "asia-southeast1"}]},
                              "limits": {"max_cost_usd": 5.0}}, "/limits/max_cost_usd", "cannot be enforced"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "pointer", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_an_invalid_spec_is_rejected_with_its_problems(user: User, change: Any, pointer: str, message: str) -> None:
    run = user.drop(change if isinstance(change, bytes) else user.spec(**change))
    record = user.wait(run)
    assert record.state is RunState.REJECTED
    assert pointer in [problem["pointer"] for problem in record.problems]
    assert any(message in str(problem["message"]) for problem in record.problems)
    stored = json.loads(user.store.read(names.errors_object(run)).data)
    assert stored["errors"] == record.problems
    assert user.executions(run) == []
    assert user.resources(run) == []
    assert [" rejected: " in headline for headline in user.slack(run, "rejected")] == [True]


def test_a_spec_with_a_disabled_secret_is_rejected(user: User) -> None:
    from google.cloud import secretmanager_v1

    parent, name = f"projects/{user.settings.project}", f"disabled-{time.time_ns()}"
    secret: dict[str, Any] = {"replication": {"automatic": {}}}
    clients.secrets().create_secret(parent=parent, secret_id=name, secret=secret)
    payload = secretmanager_v1.SecretPayload(data=b"x")
    version = clients.secrets().add_secret_version(parent=f"{parent}/secrets/{name}", payload=payload)
    clients.secrets().disable_secret_version(name=version.name)
    record = user.wait(user.drop(user.spec(notify={"slack": {"webhook_secret": name}})))
    assert record.state is RunState.REJECTED
    assert record.problems[0]["message"] == "the secret's version is DISABLED"


@pytest.mark.parametrize(
    "uri",
    [5, None, ["gs://a/b"], "", "gs://", "gs://a", "gs://a..b/spec.json", "gs://A B/spec.json", "gs://ab/\ud800",
     "gs://no-such-bucket-here/spec.json", "gs://local-project-dropforge-runs/spec.json",
     "https://user:hf_CanaryCanaryCanaryCanary@host/", "gs://abc/" + "x" * 5000,
     "gs://abc/hf_CanaryCanaryCanaryCanary.json"],
    ids=lambda uri: repr(uri)[:40],
)  # fmt: skip
def test_a_message_with_a_bad_spec_uri_is_rejected(user: User, uri: Any) -> None:
    key = f"uri-{time.time_ns()}"
    user.publish("dropforge-requests", json.dumps({"spec_uri": uri}).encode(), idempotency_key=key)
    record = user.wait(names.run_id_of_message(key))
    assert record.state is RunState.REJECTED
    assert record.problems[0]["pointer"] == "/spec_uri"
    assert "Canary" not in record.model_dump_json()


@pytest.mark.parametrize(
    "data",
    [b" " * 9_000_000, b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"NaN", b'"\\ud800"', b"null"],
    ids=lambda data: repr(data[:8]),
)
def test_a_message_with_arbitrary_bytes_is_rejected(user: User, data: bytes) -> None:
    key = f"wild-{time.time_ns()}"
    user.publish("dropforge-requests", data, idempotency_key=key)
    assert user.wait(names.run_id_of_message(key)).state is RunState.REJECTED


def test_a_literal_token_is_stored_nowhere(user: User) -> None:
    token = "hf_CanaryCanaryCanaryCanary"
    run = user.drop(user.spec(model={"source": token}))
    user.wait(run)
    stored = b"".join(user.store.read(name).data for name in user.store.names(f"runs/{run}/"))
    assert token.encode() not in stored
    assert token not in json.dumps(user.slack(run, "rejected"))
    assert token.encode() not in (user.state / "functions.log").read_bytes()


def test_objects_that_are_not_specs_start_nothing_and_the_log_says_why(user: User) -> None:
    wrong_suffix = user.drop(b"{oops", "specs/readme.txt")
    wrong_folder = user.drop(b"{oops", "elsewhere/spec.json")
    user.wait(user.drop(user.spec()))
    assert user.store.find(wrong_suffix) is None
    assert user.store.find(wrong_folder) is None
    log = (user.state / "functions.log").read_text()
    assert "specs/readme.txt started nothing: its name does not end in .json" in log
    assert "elsewhere/spec.json started nothing: it is not below specs/" in log


@pytest.mark.parametrize("message", [{"spec": {}}, {"spec_url": "gs://a/b"}, []], ids=str)
def test_a_message_in_an_unknown_envelope_is_rejected_with_one_problem(user: User, message: Any) -> None:
    key = f"envelope-{time.time_ns()}"
    user.publish("dropforge-requests", json.dumps(message).encode(), idempotency_key=key)
    [problem] = user.wait(names.run_id_of_message(key)).problems
    assert '{"spec_uri": "gs://BUCKET/OBJECT"} alone' in str(problem["expected"])


def test_malformed_messages_are_rejected_and_an_unknown_cancel_is_accepted(user: User) -> None:
    user.publish("dropforge-requests", b"{oops", idempotency_key="bad-message")
    assert user.wait(names.run_id_of_message("bad-message")).state is RunState.REJECTED
    user.publish("dropforge-requests", b'{"spec_uri": "http://x"}', idempotency_key="bad-uri")
    assert user.wait(names.run_id_of_message("bad-uri")).problems[0]["pointer"] == "/spec_uri"
    unknown = "no-such-run-0123456789ab"
    user.publish("dropforge-requests", json.dumps({"cancel": unknown}).encode())
    log = user.state / "functions.log"
    user.until(lambda: any(unknown in line and "no such run" in line for line in log.read_text().splitlines()))
    with pytest.raises(NotFound):
        user.store.record(unknown)
