"""How named endpoints on Cloud Run read its answers, and what they send. No server: each test states the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import NotFound, PermissionDenied, ServiceUnavailable
from google.cloud import run_v2
from requests import ReadTimeout

from dropforge.base.errors import CloudError, Conflict, ErrorClass
from dropforge.platforms.cloud_run.named import NamedService, service_request
from dropforge.platforms.named import Candidate, Reached, RevisionGone, Share, owner_labels
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Waits

from ...deployments import cloud_with, settings_with
from .test_preview import NOW, launch, spec_of

SETTINGS = settings_with()
SERVER = NamedService()
SPEC = spec_of()
DEPLOYMENT = Deployment("demo-0123456789ab", SPEC, SETTINGS, NOW, launch(), endpoint="e")
CANDIDATE = Candidate("rollout-2", 2, DEPLOYMENT)
NAME = SERVER.service_name(DEPLOYMENT)
SERVING, OTHER = Share("df-1", 1, 100), Share("df-2", 2, 0)
OWN = owner_labels(SETTINGS, "e")


class CloudRun:
    """Cloud Run with a service, which changes only as the test says; `updates` are the requests to change it."""

    def __init__(self, rollout: str = "rollout-1", *, stopped: bool = False, **fields: Any) -> None:
        shares = [{"revision": "df-1", "percent": 100, "tag": "r1", "uri": "https://r1"}]
        shares.append({"revision": "df-2", "tag": "r2", "uri": "https://r2"})
        scaling = {"scaling_mode": "MANUAL", "manual_instance_count": 0} if stopped else {}
        usual = {
            "name": NAME,
            "etag": "version-7",
            "labels": OWN,
            "generation": 3,
            "observed_generation": 3,
            "terminal_condition": {"state": "CONDITION_SUCCEEDED"},
            "template": {"labels": {"dropforge-rollout": rollout}},
            "traffic_statuses": shares,
            "traffic": [{k: v for k, v in share.items() if k != "uri"} for share in shares],
            "scaling": scaling,
            "uri": "https://e",
        }
        self.service = run_v2.Service({**usual, **fields})
        self.revisions = ["df-1", "df-2", "df-0"]
        self.updates: list[Any] = []
        self.deleted: list[str] = []
        self.services = services = SimpleNamespace(get_service=lambda **_: self.service, update_service=self._update)
        revisions = SimpleNamespace(list_revisions=self._list, delete_revision=self._delete)
        self.cloud = cloud_with(SETTINGS, run_services=services, run_revisions=revisions)
        ticks = iter(range(0, 10_000, 5))
        self.cloud.clock.monotonic = lambda: float(next(ticks))  # type: ignore[method-assign]

    def _update(self, request: Any, **_: Any) -> None:
        self.updates.append(request)

    def _list(self, **_: Any) -> list[Any]:
        return [SimpleNamespace(name=f"{NAME}/revisions/{each}", labels={}) for each in self.revisions]

    def _delete(self, name: str, **_: Any) -> None:
        self.deleted.append(name.rpartition("/")[2])


def too_late() -> None:
    raise Conflict("another call was faster")


def test_a_call_that_is_too_late_changes_nothing() -> None:
    for is_stopped, verb, arguments in (
        (False, SERVER.deploy, (CANDIDATE, [SERVING])),
        (False, SERVER.shift, (NAME, [SERVING])),
        (False, SERVER.suspend, (NAME, [SERVING])),
        (True, SERVER.resume, (NAME, [CANDIDATE])),
    ):
        run = CloudRun(stopped=is_stopped)
        call: Any = verb
        with pytest.raises(Conflict):
            call(run.cloud, *arguments, fence=too_late)
        assert run.updates == []


def test_an_update_names_the_version_that_was_read() -> None:
    run = CloudRun()
    assert not SERVER.shift(run.cloud, NAME, [SERVING])
    assert [(each["service"].etag, list(each["update_mask"]["paths"])) for each in run.updates] == [
        ("version-7", ["traffic"])
    ]


@pytest.mark.parametrize(("failure", "did_nothing"), [(ServiceUnavailable("no"), True), (ReadTimeout("lost"), False)])
@pytest.mark.parametrize("is_new", [False, True])
def test_only_an_answer_proves_that_a_request_made_no_revision(
    is_new: bool, failure: Exception, did_nothing: bool
) -> None:
    run = CloudRun()

    def look(**_: Any) -> Any:
        if is_new:
            raise NotFound("no service")
        return run.service

    def refuse(**_: Any) -> None:
        raise failure

    run.services.get_service, run.services.create_service, run.services.update_service = look, refuse, refuse
    with pytest.raises(CloudError) as raised:
        SERVER.deploy(run.cloud, CANDIDATE, [SERVING])
    assert raised.value.did_nothing is did_nothing


def test_a_look_proves_nothing_after_the_request() -> None:
    for looks, did_nothing in ((0, True), (1, False)):
        run = CloudRun()
        answers: Any = iter([run.service] * looks)

        def look(answers: Any = answers, **_: Any) -> Any:
            if found := next(answers, None):
                return found
            raise ServiceUnavailable("no")

        run.services.get_service = look
        with pytest.raises(CloudError) as raised:
            SERVER.deploy(run.cloud, CANDIDATE, [SERVING])
        assert (raised.value.did_nothing, len(run.updates)) == (did_nothing, looks)


def test_a_service_of_another_owner_stays_as_it_is() -> None:
    run = CloudRun(labels={**OWN, "dropforge-endpoint": "another"})
    with pytest.raises(CloudError, match="exists and belongs to"):
        SERVER.deploy(run.cloud, CANDIDATE, [SERVING])
    assert run.updates == []


def test_a_new_revision_has_every_request_only_if_it_is_alone() -> None:
    for shares, percents in (([SERVING], [100, 0]), ([], [100])):
        assert [each["percent"] for each in service_request(CANDIDATE, shares)["traffic"]] == percents


def test_only_the_revision_of_the_rollout_is_ready() -> None:
    assert isinstance(SERVER.deploy(CloudRun("rollout-1").cloud, CANDIDATE, [SERVING]), Waits)
    assert SERVER.deploy(CloudRun("rollout-2").cloud, CANDIDATE, [SERVING]) == Reached(
        "df-2", "https://r2", "https://e"
    )


def test_a_revision_without_its_address_is_waited_for() -> None:
    tagged = [{"revision": "df-1", "percent": 100, "tag": "r1", "uri": "https://r1"}, {"revision": "df-2", "tag": "r2"}]
    run = CloudRun("rollout-2", traffic_statuses=tagged)
    assert isinstance(SERVER.deploy(run.cloud, CANDIDATE, [SERVING]), Waits)
    assert SERVER.find(run.cloud, NAME, 2) is None


def test_a_revision_that_cloud_run_cannot_start_is_a_failure_with_its_reason() -> None:
    failed = {"state": "CONDITION_FAILED", "message": "The container failed to start."}
    with pytest.raises(CloudError, match="The container failed to start"):
        SERVER.deploy(CloudRun("rollout-2", terminal_condition=failed).cloud, CANDIDATE, [SERVING])


def test_an_error_of_cloud_run_is_told_with_its_class() -> None:
    run = CloudRun()

    def refuse(**_: Any) -> None:
        raise PermissionDenied("run.services.get is missing")

    run.cloud.clients.run_services().get_service = refuse
    for verb, arguments in (
        (SERVER.deploy, (CANDIDATE, [SERVING])),
        (SERVER.find, (NAME, 1)),
        (SERVER.shift, (NAME, [SERVING])),
        (SERVER.suspend, (NAME, [SERVING])),
        (SERVER.resume, (NAME, [CANDIDATE])),
        (SERVER.delete, (NAME,)),
    ):
        call: Any = verb
        with pytest.raises(CloudError, match=r"run\.services\.get is missing") as told:
            call(run.cloud, *arguments)
        assert told.value.error_class == ErrorClass.PERMISSION


def test_requests_are_moved_once_cloud_run_reports_it_and_never_to_a_deleted_revision() -> None:
    run = CloudRun()
    assert SERVER.shift(run.cloud, NAME, [SERVING, OTHER])
    assert not SERVER.shift(run.cloud, NAME, [SERVING._replace(percent=0), OTHER._replace(percent=100)])
    run.revisions.remove("df-1")
    with pytest.raises(RevisionGone, match=r"revision df-1 of .* does not exist any more"):
        SERVER.shift(run.cloud, NAME, [SERVING, OTHER])
    assert len(run.updates) == 1


def test_only_revisions_that_are_not_kept_are_deleted() -> None:
    run = CloudRun()
    SERVER.prune(run.cloud, NAME, {"df-1", "df-2"}, 2)
    assert run.deleted == ["df-0"]


def test_an_endpoint_is_suspended_and_resumed_once_cloud_run_reports_it() -> None:
    serving, stopped = CloudRun(), CloudRun(stopped=True)
    assert not SERVER.suspend(serving.cloud, NAME, [SERVING])
    assert SERVER.suspend(stopped.cloud, NAME, [SERVING])
    assert not SERVER.resume(stopped.cloud, NAME, [CANDIDATE])
    assert SERVER.resume(serving.cloud, NAME, [CANDIDATE])
    assert [len(run.updates) for run in (serving, stopped)] == [1, 1]
    assert not SERVER.suspend(CloudRun(stopped=True, observed_generation=2).cloud, NAME, [SERVING])
