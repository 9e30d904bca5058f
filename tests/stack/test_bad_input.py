"""A spec that cannot be accepted starts nothing, and says why beside the run and in Slack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge import names
from dropforge.runs import RunState

from .conftest import User

PLACEMENT = [{"region": "us-central1"}]
CASES: list[tuple[str, Any, str, str]] = [
    ("not JSON", b"{oops", "", "not JSON"),
    ("empty", b"", "", "not JSON"),
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
    ("unknown secret", {"secrets": {"HF_TOKEN": "nobody-made-this"}}, "/secrets/HF_TOKEN", "secret does not exist"),
    ("missing object", {"dataset": {"source": "gs://local-project-dropforge-runs/none.jsonl"}},
     "/dataset/source", "object does not exist"),
    ("missing bucket", {"dataset": {"source": "gs://no-such-bucket-here/none.jsonl"}},
     "/dataset/source", "bucket does not exist"),
    ("does not fit", {"model": {"source": "meta-llama/Llama-3.1-70B"}}, "/model/source", "does not fit"),
    ("budget without price", {"target": {"type": "cloud_run", "placements": [{"region": "asia-southeast1"}]},
                              "limits": {"max_cost_usd": 5.0}}, "/limits/max_cost_usd", "cannot be enforced"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "pointer", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_bad_spec_is_rejected_with_its_reason(user: User, change: Any, pointer: str, message: str) -> None:
    run = user.drop(change if isinstance(change, bytes) else user.spec(**change))
    record = user.wait(run)
    assert record.state is RunState.REJECTED
    assert pointer in [problem["pointer"] for problem in record.problems]
    assert any(message in str(problem["message"]) for problem in record.problems)
    beside = json.loads(user.store.read(names.errors_object(run)).data)
    assert beside["errors"] == record.problems
    assert user.executions(run) == []
    assert user.resources(run) == []
    assert [headline.split()[-1] for headline in user.slack(run, "rejected")] == ["rejected"]


def test_a_literal_token_is_kept_nowhere(user: User) -> None:
    token = "hf_CanaryCanaryCanaryCanary"
    run = user.drop(user.spec(model={"source": token}))
    user.wait(run)
    kept = b"".join(user.store.read(name).data for name in user.store.names(f"runs/{run}/"))
    assert token.encode() not in kept
    assert token not in json.dumps(user.slack(run, "rejected"))
    assert token.encode() not in (user.state / "functions.log").read_bytes()


def test_other_objects_of_the_inbox_are_ignored(user: User) -> None:
    run = user.drop(b"{oops", "specs/readme.txt")
    other = user.drop(b"{oops", "elsewhere/spec.json")
    user.wait(user.drop(user.spec()))
    assert user.store.find(run) is None
    assert user.store.find(other) is None


def test_a_bad_message_is_rejected_too(user: User) -> None:
    user.publish("dropforge-requests", b"{oops", idempotency_key="bad-message")
    assert user.wait(names.run_id_of_message("bad-message")).state is RunState.REJECTED
    user.publish("dropforge-requests", b'{"spec_uri": "http://x"}', idempotency_key="bad-uri")
    assert user.wait(names.run_id_of_message("bad-uri")).problems[0]["pointer"] == "/spec_uri"
    user.publish("dropforge-requests", b'{"cancel": "no-such-run-0123456789ab"}')
