"""Many runs at once, half of them cancelled while they begin: none lost, none doubled, nothing left.

`python -m bench.load` does the same with thousands.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.cloud.workflows import executions_v1

from dropforge.base import names
from dropforge.run.record import ResourceState, RunState

from ..deployments import clients
from .conftest import User

RUNS = 40


@pytest.mark.slow
def test_a_crowd_of_specs_and_of_cancellations(user: User) -> None:
    with ThreadPoolExecutor(4) as threads:
        kept = [threads.submit(user.drop, user.spec()) for _ in range(RUNS // 2)]
        hanging = [threads.submit(user.drop, user.spec("hang")) for _ in range(RUNS // 2)]
        succeeding, cancelled = [one.result() for one in kept], [one.result() for one in hanging]
    wait_for_records(user, cancelled)  # and no longer: most of them are being submitted, provisioned or started
    topic = user.settings.topic(user.settings.requests_topic)
    for sent in [clients.publisher().publish(topic, json.dumps({"cancel": run}).encode()) for run in cancelled]:
        sent.result(60)
    ended = {run: user.wait(run, timeout=90) for run in [*succeeding, *cancelled]}
    assert {run: ended[run].state for run in succeeding} == dict.fromkeys(succeeding, RunState.SUCCEEDED)
    assert {run: ended[run].state for run in cancelled} == dict.fromkeys(cancelled, RunState.CANCELLED)
    wait_for_executions(user, succeeding, cancelled)
    for run, record in ended.items():
        assert [t.state for t in record.history].count(record.state) == 1
        assert record.attempt <= 1
        assert all(entry.state is ResourceState.GONE for entry in user.store.ledger(run).entries)
    jobs = clients.run_jobs().list_jobs(parent=f"projects/{user.settings.project}/locations/us-central1")
    assert not [job.name for job in jobs if job.labels.get(names.RUN_LABEL) in ended]


def wait_for_records(user: User, runs: list[str]) -> None:
    for run in runs:
        user.until(lambda run=run: user.store.find(run), timeout=60)  # type: ignore[misc]


def wait_for_executions(user: User, succeeded: list[str], cancelled: list[str]) -> None:
    """Until one execution of each run, and no other, has ended well; a run that was cancelled at once may have none."""
    request = executions_v1.ListExecutionsRequest(
        parent=user.settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=1000
    )
    deadline, found = time.monotonic() + 30, Counter[tuple[str, str]]()
    while time.monotonic() < deadline:
        listed = clients.workflow_executions().list_executions(request)
        labelled = [(one.labels.get(names.RUN_LABEL, ""), one.state.name) for one in listed]
        found = Counter(one for one in labelled if one[0] in succeeded + cancelled)
        once = set(found.values()) == {1} and {state for _, state in found} == {"SUCCEEDED"}
        if once and {run for run, _ in found} >= set(succeeded):
            return
        time.sleep(0.2)
    raise AssertionError(f"expected one execution of each run, SUCCEEDED; found {found}")
