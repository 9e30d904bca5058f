"""Every path of the production workflow, with scripted answers of the functions and a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from workflows_engine import ScriptedMocks, Simulation, simulate

SOURCE = (Path(__file__).resolve().parents[2] / "workflows" / "run.workflows.yaml").read_text()
URL = "https://functions.example/dropforge-"

# The virtual clock never reaches the deadline.
RUNNING = {"status": "RUNNING", "deadline": 2e9, "attempt": 1, "wait_seconds": 2}
TRAINED = {"status": "SUCCEEDED", "serve": True, "gate": {"passed": True}}
TRAINED_ONLY = {**TRAINED, "serve": False}
WAITING = {"status": "WAITING", "wait_seconds": 300}
READY = {"status": "READY"}
GONE = {"status": "GONE", "cancelled": False}
SUPERSEDED = {"status": "SUPERSEDED"}
FINAL: dict[str, dict[str, Any]] = {
    "provision": RUNNING,
    "inspect": TRAINED,
    "deploy": READY,
    "teardown": {"status": "ENDED", "state": "SUCCEEDED"},
}
PREEMPTED = {"status": "FAILED", "retry": True, "error": {"error_class": "preempted", "message": "x"}}
CANCELLED = {"status": "CANCELLED", "retry": False, "error": {"error_class": "cancelled", "message": "x"}}


def error_of(error_class: str) -> dict[str, Any]:
    return {"error_class": error_class, "message": "why", "hint": ""}


def ended(state: str) -> dict[str, Any]:
    return {"status": "ENDED", "state": state}


def failed(error_class: str) -> dict[str, Any]:
    return {"status": "FAILED", "retry": False, "error": error_of(error_class)}


class Run:
    """A simulated execution. `answers` are the bodies of the functions in order, or {"raise": ...} or {"code": ...}."""

    def __init__(self, callbacks: list[dict[str, Any]] | None = None, **answers: list[dict[str, Any]]) -> None:
        rules = [_rule(name, answers.get(name, [final])) for name, final in FINAL.items()]
        rules += [
            {"call": "events.await_callback", "responses": callbacks or [{"timeout": True, "times": "always"}]},
            {"call": "sys.log", "return": None},
        ]
        self.mocks = ScriptedMocks(rules)
        self.simulation: Simulation = simulate(SOURCE, {"run": "r-1"}, mocks=self.mocks, env={"FUNCTIONS_URL": URL})

    @property
    def status(self) -> str:
        return str(self.simulation.result["status"])

    @property
    def seconds(self) -> float:
        """How long the execution took by the virtual clock."""
        record = self.simulation.record
        assert record.started is not None
        assert record.ended is not None
        return record.ended - record.started

    @property
    def error_class(self) -> str:
        return str(self.simulation.result["error"]["error_class"])

    @property
    def stages(self) -> list[str]:
        """The called functions in order; teardown with its scope and, at the run's end, its outcome."""
        return [_stage(call.arguments) for call in self.mocks.calls if call.call == "http.post"]

    def bodies(self, name: str) -> list[Mapping[str, Any]]:
        posts = [c.arguments for c in self.mocks.calls if c.call == "http.post"]
        return [_body(a) for a in posts if a["url"] == URL + name]


def _rule(name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    responses = [a if {"raise", "code"} & set(a) else {"body": a} for a in answers]
    return {
        "call": "http.post",
        "where": {"url": URL + name},
        "responses": [*responses[:-1], {**responses[-1], "times": "always"}],
    }


def _stage(arguments: Mapping[str, Any]) -> str:
    name, body = str(arguments["url"]).removeprefix(URL), _body(arguments)
    if name != "teardown":
        return name
    return f"teardown {'run' if body['scope'] == 'run' else 'attempt'}" + (
        f" {body['outcome']['state']}" if body["outcome"] else ""
    )


def _body(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    body: Mapping[str, Any] = arguments["body"]
    return body


END = ["teardown run SUCCEEDED"]
FAIL = ["teardown run FAILED"]


def test_a_served_run() -> None:
    run = Run()
    assert run.status == "SUCCEEDED"
    assert run.stages == ["provision", "inspect", "teardown attempt", "deploy", *END]
    assert [body["keep_endpoint"] for body in run.bodies("teardown")] == [True, True]


def test_a_look_follows_after_the_time_that_the_last_answer_says() -> None:
    def seconds(*answers: dict[str, Any]) -> float:
        return Run(inspect=[*answers, TRAINED_ONLY]).seconds

    assert seconds(WAITING) - seconds() == WAITING["wait_seconds"]
    assert seconds(WAITING, {**WAITING, "wait_seconds": 7}) - seconds(WAITING) == 7


def test_a_train_only_run() -> None:
    run = Run(inspect=[TRAINED_ONLY])
    assert run.status == "SUCCEEDED"
    assert run.stages == ["provision", "inspect", *END]


def test_every_call_names_this_execution_and_carries_a_token_for_its_url() -> None:
    run = Run()
    posts = [call.arguments for call in run.mocks.calls if call.call == "http.post"]
    assert {_body(post)["execution"] for post in posts} == {run.simulation.record.name.rsplit("/", 1)[1]}
    assert all(list(post["auth"]) == ["OIDC", post["url"]] for post in posts)


@pytest.mark.parametrize("callbacks", [[{"timeout": True, "times": "always"}], [{"body": {}, "times": "always"}]])
def test_a_time_out_and_a_callback_both_lead_to_inspect(callbacks: list[dict[str, Any]]) -> None:
    run = Run(callbacks, inspect=[WAITING, WAITING, WAITING, TRAINED_ONLY])
    assert run.stages == ["provision", "inspect", "inspect", "inspect", "inspect", *END]
    assert len({body["callback_url"] for body in [*run.bodies("provision"), *run.bodies("inspect")]}) == 1


def test_a_pending_stage_is_called_again() -> None:
    pending = {"status": "PENDING", "wait_seconds": 5}
    run = Run(
        provision=[pending, pending, RUNNING], deploy=[pending, READY], teardown=[GONE, pending, ended("SUCCEEDED")]
    )
    assert run.status == "SUCCEEDED"
    assert [run.stages.count(name) for name in ("provision", "deploy", *END)] == [3, 2, 2]


@pytest.mark.parametrize("where", ["provision", "deploy"])
def test_a_cancel_ends_the_wait_of_a_stage_by_the_callback(where: str) -> None:
    pending = {"status": "PENDING", "wait_seconds": 30}
    waited = [
        Run(callbacks, **{where: [pending, pending, CANCELLED], "teardown": [ended("CANCELLED")]}).seconds
        for callbacks in ([{"timeout": True, "times": "always"}], [{"body": {}, "times": "always"}])
    ]
    assert waited[0] >= 2 * 30 > waited[1]  # of the virtual clock


def test_the_training_machine_is_deleted_before_the_endpoint_is_created() -> None:
    pending = {"status": "PENDING", "wait_seconds": 3}
    run = Run(teardown=[pending, {"code": 503}, pending, GONE, ended("SUCCEEDED")])
    assert run.status == "SUCCEEDED"
    assert run.stages[2:] == [*["teardown attempt"] * 4, "deploy", *END]


@pytest.mark.parametrize("error_class", ["config", "data", "permission", "out_of_memory", "deadline", "code"])
@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
def test_each_failure_tears_down_and_ends_the_run(where: str, error_class: str) -> None:
    run = Run(**{where: [failed(error_class)], "teardown": [ended("FAILED")]})
    assert run.status == "FAILED"
    assert run.error_class == error_class
    assert run.stages[-1:] == FAIL
    assert run.bodies("teardown")[-1]["keep_endpoint"] is False
    assert run.bodies("teardown")[-1]["outcome"]["error"] == error_of(error_class)


def test_a_failed_gate_deploys_nothing() -> None:
    run = Run(inspect=[{**TRAINED, "gate": {"passed": False, "error": error_of("gate")}}])
    assert run.error_class == "gate"
    assert "deploy" not in run.stages
    assert run.stages[-1:] == FAIL


@pytest.mark.parametrize("where", ["provision", "inspect"])
def test_a_failure_that_allows_a_retry_leads_to_another_attempt_after_teardown(where: str) -> None:
    answers = {"provision": [RUNNING], "inspect": [TRAINED_ONLY]}
    run = Run(**{**answers, where: [PREEMPTED, *answers[where]]})
    assert run.status == "SUCCEEDED"
    assert run.stages.count("teardown attempt") == 1
    assert [body["attempt"] for body in run.bodies("provision")] == [1, 2]


@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
def test_cancel_wins_at_every_step(where: str) -> None:
    run = Run(**{where: [CANCELLED], "teardown": [ended("CANCELLED")]})
    assert run.status == "CANCELLED"
    assert run.stages[-1] == "teardown run CANCELLED"


def test_the_state_in_which_teardown_ends_the_run_counts() -> None:
    """A cancel may arrive after the endpoint is ready, or after a failure."""
    run = Run(teardown=[GONE, ended("CANCELLED")])
    assert run.status == "CANCELLED"
    run = Run(inspect=[failed("code")], teardown=[ended("CANCELLED")])
    assert run.status == "CANCELLED"
    assert run.error_class == "code"


def test_an_execution_that_loses_its_run_during_the_teardown_says_so() -> None:
    run = Run(inspect=[TRAINED_ONLY], teardown=[{**SUPERSEDED, "state": "FAILED"}])
    assert run.status == "SUPERSEDED"


@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
def test_a_duplicate_execution_touches_nothing(where: str) -> None:
    run = Run(**{where: [SUPERSEDED]})
    assert run.status == "SUPERSEDED"
    assert not any(stage.startswith("teardown run") for stage in run.stages)
    assert run.stages.count("teardown attempt") == (where == "deploy")  # the function refuses it


@pytest.mark.parametrize(
    "fault",
    [{"code": 429}, {"code": 503}, {"code": 500}, {"raise": {"tags": ["ConnectionError"], "message": "reset"}}],
)
@pytest.mark.parametrize("where", ["provision", "inspect", "deploy", "teardown"])
def test_a_transient_error_is_retried(where: str, fault: dict[str, Any]) -> None:
    run = Run(**{where: [fault, fault, FINAL[where]]})
    assert run.status == "SUCCEEDED"


@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
@pytest.mark.parametrize("fault", [{"code": 400}, {"code": 404}, {"code": 503}])
def test_a_function_that_stays_broken_fails_the_run_and_tears_down(where: str, fault: dict[str, Any]) -> None:
    answers = {"provision": [{**RUNNING, "deadline": 0}], "teardown": [ended("FAILED")]}
    run = Run(**{**answers, where: [fault]})
    assert run.error_class == "infrastructure"
    assert str(fault["code"]) in run.simulation.result["error"]["message"]
    assert run.stages[-1:] == FAIL


OUTAGE: list[dict[str, Any]] = [{"code": 503}] * 9 * 10  # ten times as many as call_function retries


@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
def test_an_outage_of_a_function_does_not_end_a_healthy_run(where: str) -> None:
    run = Run(**{where: [*OUTAGE, FINAL[where]]})
    assert run.status == "SUCCEEDED"


@pytest.mark.parametrize("code", [400, 404])
@pytest.mark.parametrize("where", ["provision", "inspect", "deploy"])
def test_a_permanent_error_ends_the_run_at_once(where: str, code: int) -> None:
    run = Run(**{where: [{"code": code}]})
    assert run.stages.count(where) == 1
    assert run.stages[-1:] == FAIL


def test_the_workflow_waits_for_an_outage_until_the_deadline_of_the_attempt_only() -> None:
    run = Run(provision=[{**RUNNING, "deadline": 0}], inspect=[{"code": 503}])
    assert run.error_class == "infrastructure"
    assert run.stages.count("inspect") == 9


def test_a_callback_ends_the_wait_of_an_outage() -> None:
    run = Run([{"body": {}, "times": "always"}], inspect=[*OUTAGE[:9], TRAINED_ONLY])
    assert run.status == "SUCCEEDED"
    assert run.stages.count("inspect") == 10


def test_teardown_is_retried_until_it_succeeds() -> None:
    run = Run(inspect=[TRAINED_ONLY], teardown=[*[{"code": 500}] * 30, ended("SUCCEEDED")])
    assert run.status == "SUCCEEDED"
    assert run.stages.count(*END) == 31


def test_teardown_of_a_run_that_does_not_exist_ends_the_execution() -> None:
    run = Run(teardown=[{"code": 404}])
    assert run.simulation.state == "FAILED"


@pytest.mark.parametrize("fault", [{"code": 503}, {"code": 403}])
def test_the_run_is_ended_however_long_that_takes(fault: dict[str, Any]) -> None:
    run = Run(inspect=[TRAINED_ONLY], teardown=[*[fault] * 500, ended("SUCCEEDED")])
    assert run.status == "SUCCEEDED"
    assert run.stages.count(*END) == 501


def test_a_year_of_waiting_takes_no_time() -> None:
    run = Run(inspect=[*[{**WAITING, "wait_seconds": 43200}] * 700, TRAINED_ONLY])
    assert run.status == "SUCCEEDED"


def test_an_execution_that_takes_over_continues_the_current_attempt() -> None:
    run = Run(provision=[{**RUNNING, "attempt": 3}, {**RUNNING, "attempt": 4}], inspect=[PREEMPTED, TRAINED_ONLY])
    assert run.status == "SUCCEEDED"
    assert [body["attempt"] for body in run.bodies("provision")] == [1, 4]
    assert [body["attempt"] for body in run.bodies("inspect")] == [3, 4]
    assert [body["scope"] for body in run.bodies("teardown")] == [3, "run"]


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
def test_an_execution_that_takes_over_a_teardown_ends_the_run_with_its_planned_outcome(state: str) -> None:
    error = None if state == "SUCCEEDED" else error_of("code")
    planned = {"status": state, "error": error, "retry": False, "gate": {"passed": True}, "serve": False}
    run = Run(provision=[planned])
    assert run.stages == ["provision", f"teardown run {state}"]
    assert run.bodies("teardown")[0]["keep_endpoint"] is (state == "SUCCEEDED")
    assert run.bodies("teardown")[0]["outcome"]["error"] == error


def test_teardown_gets_the_outcome_of_the_run_but_none_between_attempts() -> None:
    run = Run(inspect=[PREEMPTED, failed("code")])
    attempt, last = run.bodies("teardown")
    assert attempt["outcome"] is None
    assert last["outcome"] == {"state": "FAILED", "error": error_of("code")}
