"""Shared endpoints: what fits beside what, who may take a name, and what a revision without one adapter is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import InvalidSpec
from dropforge.endpoints import shared
from dropforge.endpoints.budget import Budget
from dropforge.endpoints.record import EndpointRecord, RolloutState
from dropforge.endpoints.shared import Adapter
from dropforge.platforms.serving import Served, adapters_variable
from dropforge.run.artifacts import MANIFEST, ArtifactFile, Manifest, Source, model_prefix
from dropforge.run.proof import ACCESS_NAME, is_proved, with_proof
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.job_spec import MOST_ADAPTERS
from dropforge.stages.rollout import requests
from dropforge.stages.rollout.advance import advance
from dropforge.stages.rollout.requests import Refused, check_name, put_behind
from dropforge.stages.sweep.named import tend

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document

SETTINGS = settings_with(runs_bucket="runs", operations_topic="operations", rollout_workflow="rollout")
NOW = datetime(2026, 11, 26, tzinfo=UTC)
HOUR = timedelta(hours=1)
FILES = ("base/model.safetensors", "adapter/adapter_model.safetensors", "seal.json")
SHARE = {"type": "cloud_run", "share": True, "ttl": "1h"}


class Deployment:
    """A deployment whose rollouts never begin by themselves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storage, self.now, self.runs = Memory(), NOW, 0
        self.context = context_with(SETTINGS, lambda: self.now, storage=self.storage)
        self.begun: list[str] = []
        patch.setattr(requests, "start_rollout", lambda cloud, endpoint, rollout: self.begun.append(rollout))
        patch.setattr("dropforge.stages.rollout.advance.tell", lambda *_: True)

    def commit(self, name: str = "sql", *, base: str = "b", topic: str = "", **changes: Any) -> tuple[Record, JobSpec]:
        """A run that has committed an adapter; `changes` are of its manifest."""
        self.runs += 1
        run = names.run_id_of_message(str(self.runs), topic)
        serve = {**SHARE, **changes.pop("serve", {})}
        spec = parse_spec(json.dumps(document(name=name, serve=serve)).encode())
        digests = {"base/model.safetensors": base}
        files = [
            ArtifactFile(path=f"attempt-1/{path}", size=1, sha256=digests.get(path, run), crc32c="") for path in FILES
        ]
        source = Source(uri=spec.model.source, revision="r")
        paths = {"serve_path": "attempt-1/base", "adapter_path": "attempt-1/adapter", "files": files}
        fixed = {"run": run, "attempt": 1, "created": NOW, "spec_sha256": "", "base": source, "dataset": source}
        manifest = Manifest.model_validate({**fixed, **paths, **changes})
        store, state = self.context.store, RunState.SUCCEEDED
        history = [{"state": state, "time": NOW}]
        record = Record.model_validate(
            {
                "run": run,
                "name": name,
                "source": "s",
                "topic": topic,
                "state": state,
                "created": NOW,
                "history": history,
            }
        )
        record = store.with_key(record)
        store.create(record)
        store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode())
        path = model_prefix(run) + MANIFEST
        stored = json.loads(manifest.model_dump_json(exclude={"proof"}))
        store.put_new(path, with_proof(store.key(run), path, stored))
        return record, spec

    def put(self, record: Record, spec: JobSpec, endpoint: str = "tiny", topic: str | None = None) -> EndpointRecord:
        source = record.topic if topic is None else topic
        return put_behind(self.context, record, spec, endpoint, record.run, "me", source, None)

    def serve(self, *adapters: Adapter, endpoint: str = "tiny") -> EndpointRecord:
        """Let an endpoint serve these adapters, without a platform."""
        record, spec = self.commit()
        known = self.put(record, spec, endpoint)
        revision = {"number": 1, "run": record.run, "digest": "d", "who": "me", "requested": NOW, "adapters": adapters}
        made = {**known.model_dump(), "revisions": [revision], "stable": 1, "rollouts": []}
        made["expires"] = NOW + 10 * HOUR
        return self.context.endpoints.update("tiny", lambda _: EndpointRecord.model_validate(made))

    def begin(self, rollout: str) -> EndpointRecord:
        """The record after the first step of a rollout; nothing is deployed."""
        with pytest.raises(IndexError):  # the runs of this test have no attempt to deploy
            advance(self.context, "tiny", rollout, "e-1")
        return self.context.endpoints.record("tiny")


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(monkeypatch)


def adapter(name: str, **changes: Any) -> Adapter:
    return Adapter(**{"name": name, "run": f"run-{name}", "digest": "d", "source": "", "sealed": True, **changes})


def test_models_of_one_base_get_one_endpoint_without_a_name_and_sources_never_do(deployment: Deployment) -> None:
    def name(**changes: Any) -> str:
        return deployment.put(*deployment.commit(**changes), endpoint="").name

    first = name()
    assert names.is_endpoint_name(first), first
    assert name(name="other") == first
    deployment.context.endpoints.update(first, lambda r: r.model_copy(update={"retired": NOW, "rollouts": []}))
    again = name()
    assert again != first, "the name of a retired endpoint stays taken"
    assert name(name="other") == again
    repeated = deployment.commit(base="another")
    asked = deployment.put(*repeated, endpoint="").name
    deployment.context.endpoints.update(asked, lambda r: r.model_copy(update={"retired": NOW}))
    assert deployment.put(*repeated, endpoint="").name == asked, "a message that is delivered twice makes one endpoint"
    others = [again, name(base="c"), name(topic="requests-team"), name(serve={"max_model_len": 4096})]
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base": "c"}, "its base is google/gemma-2b "),
        ({"serve": {"max_model_len": 4096}}, "serve.max_model_len is 4096, and the endpoint's is 2048"),
        ({"serve": {"region": "europe-west4"}}, "its URL would change"),
        ({"adapter_path": None}, "it has no adapter"),
        ({"serve_path": "attempt-1/model"}, "its adapter was merged into the model"),
        ({"files": []}, "it has no parity seal"),
        ({"name": "tiny"}, "'tiny' is the name of the endpoint"),
        ({"topic": "requests-team"}, "belongs to the specs bucket"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    deployment: Deployment, changes: dict[str, Any], why: str
) -> None:
    before = deployment.put(*deployment.commit())
    record, spec = deployment.commit(**{"name": "other", **changes})
    with pytest.raises(Refused) as refused:
        deployment.put(record, spec)
    assert why in refused.value.message
    assert deployment.context.endpoints.record("tiny") == before


def test_the_name_of_a_model_belongs_to_its_source_also_for_operators(deployment: Deployment) -> None:
    deployment.serve(adapter("sql"), adapter("theirs", source="requests-team"))
    with pytest.raises(Refused, match="the name 'theirs' is taken by run run-theirs of another source"):
        deployment.put(*deployment.commit("theirs"), topic="operations")
    assert deployment.put(*deployment.commit("sql")).current is not None, "a new model of one's own takes its place"


def test_a_full_endpoint_takes_a_new_model_only_in_the_place_of_one(deployment: Deployment) -> None:
    deployment.serve(*(adapter(f"m-{number}") for number in range(MOST_ADAPTERS)))
    record, spec = deployment.commit("one-more")
    with pytest.raises(Refused, match=f"it serves {MOST_ADAPTERS} models, and at most {MOST_ADAPTERS} fit"):
        deployment.put(record, spec)
    with pytest.raises(InvalidSpec, match="at most"):
        check_name(deployment.context, spec.model_copy(update={"serve": named(spec)}), "")
    assert deployment.put(*deployment.commit("m-3")).current is not None


def named(spec: JobSpec, **changes: Any) -> Any:
    assert spec.serve is not None
    return spec.serve.model_copy(update={"endpoint": "tiny", **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"serve": {"share": False}}, "serves the adapters of many runs"),
        ({"serve": {"max_num_seqs": 8}}, "serve.max_num_seqs is 8, and the endpoint's is 32"),
        ({"model": "owner/other"}, "its base is owner/other, and the endpoint's is google/gemma-2b"),
    ],
)
def test_a_spec_that_cannot_fit_is_refused_before_the_training(
    deployment: Deployment, changes: dict[str, Any], why: str
) -> None:
    deployment.serve(adapter("sql"))
    _, spec = deployment.commit("other")
    model = spec.model.model_copy(update={"source": changes.get("model", spec.model.source)})
    wrong = spec.model_copy(update={"serve": named(spec, **changes.get("serve", {})), "model": model})
    with pytest.raises(InvalidSpec) as refused:
        check_name(deployment.context, wrong, "")
    assert why in str(refused.value)
    check_name(deployment.context, spec.model_copy(update={"serve": named(spec)}), "")


def test_a_rollout_adds_an_adapter_to_those_that_serve_when_its_turn_comes(deployment: Deployment) -> None:
    deployment.serve(adapter("sql"), adapter("emails"))
    record, spec = deployment.commit("sql")
    deployment.put(record, spec)
    found = deployment.begin(record.run).revision(2)
    assert [(each.name, each.run, each.sealed) for each in found.adapters] == [
        ("emails", "run-emails", True),
        ("sql", record.run, False),  # the new one has not passed its whole seal
    ]
    assert found.run == record.run


def test_a_model_is_taken_away_only_if_it_is_still_the_one_of_the_request(deployment: Deployment) -> None:
    record, _ = deployment.commit("emails")
    deployment.serve(adapter("sql", run="gone-0123456789ab"), adapter("emails", run=record.run))
    with pytest.raises(Refused, match="serves no model 'third' of a run; it serves: sql, emails"):
        requests.remove(deployment.context, "tiny", "third", "r-1", "me", "")
    with pytest.raises(Refused, match="belongs to the specs bucket"):
        requests.remove(deployment.context, "tiny", "sql", "r-1", "me", "requests-team")
    requests.remove(deployment.context, "tiny", "sql", "r-1", "me", "")
    asked = deployment.context.endpoints.record("tiny").rollout("r-1")
    left = deployment.begin("r-1")
    assert [each.name for each in left.revision(2).adapters] == ["emails"]
    assert left.revision(2).run == record.run
    for each in (asked.model_copy(update={"run": "another"}), asked.model_copy(update={"model": "never"})):
        again = each.model_copy(update={"id": f"r-{each.run}-{each.model}", "requested": NOW})
        ended = left.rollout("r-1").model_copy(update={"state": RolloutState.ROLLED_BACK})
        deployment.context.endpoints.update("tiny", lambda r, a=again, e=ended: r.with_rollout(e).with_rollout(a))  # type: ignore[misc]
        advance(deployment.context, "tiny", again.id, "e-1")
        found = deployment.context.endpoints.record("tiny").rollout(again.id)
        assert (found.state, found.error is not None) == (RolloutState.ROLLED_BACK, True)


def test_the_last_model_stays_while_a_rollout_waits_that_adds_another_one(deployment: Deployment) -> None:
    """Its end would retire the endpoint, and the rollout would fail."""
    deployment.serve(adapter("sql"))
    requests.remove(deployment.context, "tiny", "sql", "r-1", "me", "")
    record, spec = deployment.commit("emails")
    deployment.put(record, spec)
    advance(deployment.context, "tiny", "r-1", "e-1")
    found = deployment.context.endpoints.record("tiny").rollout("r-1")
    assert found.state is RolloutState.ROLLED_BACK
    assert found.error is not None
    assert "retire it after that" in found.error.message
    assert [each.name for each in deployment.begin(record.run).revision(2).adapters] == ["sql", "emails"]


def test_the_sweep_takes_a_model_past_its_expiry_and_tries_again_after_a_failure(deployment: Deployment) -> None:
    deployment.serve(adapter("sql", expires=NOW + HOUR), adapter("emails", expires=NOW + 2 * HOUR))
    assert tend(deployment.context, "tiny", [], NOW) == ""
    begun = tend(deployment.context, "tiny", [], NOW + HOUR)
    rollout = deployment.context.endpoints.record("tiny").rollout(begun)
    assert (rollout.kind, rollout.model, rollout.run) == ("remove", "sql", "run-sql")

    def failed(latest: EndpointRecord) -> EndpointRecord:
        ended = latest.rollout(begun).model_copy(update={"state": RolloutState.ROLLED_BACK})
        tried = latest.revision(1).model_copy(update={"number": 2})
        return latest.model_copy(update={"revisions": [*latest.revisions, tried]}).with_rollout(ended)

    deployment.context.endpoints.update("tiny", failed)
    assert tend(deployment.context, "tiny", [], NOW + HOUR) not in ("", begun)


def test_an_extension_is_of_every_model(deployment: Deployment) -> None:
    deployment.serve(adapter("sql", expires=NOW + HOUR), adapter("emails", expires=NOW + 2 * HOUR))
    record = requests.extend(deployment.context, "tiny", "7d", "")
    assert {each.expires for each in record.adapters} == {record.expires} == {NOW + timedelta(days=7)}


def test_models_of_a_revision_share_its_cost(deployment: Deployment) -> None:
    record = deployment.serve(adapter("sql"), adapter("emails"))
    priced = record.revision(1).model_copy(update={"usd_per_hour": 2.0, "paid_since": NOW})
    alone = priced.model_copy(update={"number": 2, "adapters": [adapter("sql")]})
    costs = record.model_copy(update={"revisions": [priced, alone]}).cost_by_model(NOW + HOUR)
    assert costs == {"sql": 3.0, "emails": 1.0}
    unpriced = alone.model_copy(update={"number": 3, "usd_per_hour": None})
    costs = record.model_copy(update={"revisions": [priced, unpriced]}).cost_by_model(NOW + HOUR)
    assert costs == {"sql": None, "emails": 1.0}


def test_models_with_and_without_a_budget_share_an_endpoint(deployment: Deployment) -> None:
    """The budget is the endpoint's, and changes no answer."""
    deployment.put(*deployment.commit())
    with_budget = deployment.commit("emails", serve={"endpoint": "tiny", "budget": {"usd": 50, "per": "month"}})
    assert deployment.put(*with_budget).rollouts[-1].run == with_budget[0].run


def test_only_the_last_model_is_taken_from_a_suspended_endpoint(deployment: Deployment) -> None:
    """The others would need a revision, and nothing could check it."""
    deployment.serve(adapter("sql"), adapter("emails"))
    spent = Budget(usd=1, per="day", by="me", asked=NOW, began=NOW, before_usd=0)
    store = deployment.context.endpoints
    store.update("tiny", lambda r: r.model_copy(update={"suspended": NOW, "budget": spent}))
    with pytest.raises(Refused, match="suspended"):
        requests.remove(deployment.context, "tiny", "sql", "r-1", "me", "")
    alone = [adapter("emails")]
    store.update("tiny", lambda r: r.with_revision(1, lambda each: each.model_copy(update={"adapters": alone})))
    assert requests.remove(deployment.context, "tiny", "emails", "r-2", "me", "").find("r-2") is not None


def test_a_server_has_the_access_of_each_run_whose_adapter_it_serves() -> None:
    adapters = tuple(Served(name, f"run-{name}", "d", f"key-{name}") for name in ("sql", "emails"))
    for each, document_ in zip(adapters, json.loads(adapters_variable(adapters)["DROPFORGE_ADAPTERS"]), strict=True):
        assert is_proved(each.key, ACCESS_NAME, each.run.encode(), document_["proof"])
        assert each.key not in json.dumps(document_)
    assert adapters_variable(()) == {}


def test_only_files_that_change_answers_make_another_base(deployment: Deployment) -> None:
    record, spec = deployment.commit()
    assert spec.serve is not None
    manifest = Manifest.model_validate_json(deployment.storage.objects[model_prefix(record.run) + MANIFEST][0])

    def digest(path: str) -> str:
        more = ArtifactFile(path=f"attempt-1/base/{path}", size=1, sha256="x", crc32c="")
        assert spec.serve is not None
        return shared.base_of(manifest.model_copy(update={"files": [*manifest.files, more]}), spec.serve).digest

    plain = shared.base_of(manifest, spec.serve).digest
    assert {digest(path) for path in ("generation_config.json", "README.md", "tokenizer_config.json")} == {plain}
    assert plain not in {digest(path) for path in ("config.json", "tokenizer.json", "chat_template.jinja")}
