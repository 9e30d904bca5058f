"""Many runs at once, half of them cancelled while they begin: no run is lost or doubled, and no resource is left.

`python -m bench.load` does the same with thousands of runs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.cloud.workflows import executions_v1
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.record import ResourceState, RunState

from ..deployments import clients
from .conftest import User

RUNS = 40


@pytest.mark.slow
def test_many_specs_and_cancels_at_once(user: User) -> None:
    with ThreadPoolExecutor(4) as threads:
        uploads = [threads.submit(user.drop, user.spec()) for _ in range(RUNS // 2)]
        hanging_uploads = [threads.submit(user.drop, user.spec("hang")) for _ in range(RUNS // 2)]
        succeeding, cancelled = [future.result() for future in uploads], [future.result() for future in hanging_uploads]
    # Cancel as soon as the records exist: most runs are then in submit or provision.
    wait_for_records(user, cancelled)
    topic = user.settings.topic(user.settings.operations_topic)
    for sent in [clients.publisher().publish(topic, json.dumps({"cancel": run}).encode()) for run in cancelled]:
        sent.result(60)
    ended = {run: user.wait(run, timeout=PATIENCE_SECONDS) for run in [*succeeding, *cancelled]}
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
    """Wait until each run has exactly one execution and it succeeded; a run that was cancelled early may have none."""
    request = executions_v1.ListExecutionsRequest(
        parent=user.settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=1000
    )
    deadline, counts = time.monotonic() + PATIENCE_SECONDS, Counter[tuple[str, str]]()
    while time.monotonic() < deadline:
        listed = clients.workflow_executions().list_executions(request)
        labelled = [(execution.labels.get(names.RUN_LABEL, ""), execution.state.name) for execution in listed]
        counts = Counter((run, state) for run, state in labelled if run in succeeded + cancelled)
        is_single = set(counts.values()) == {1} and {state for _, state in counts} == {"SUCCEEDED"}
        if is_single and {run for run, _ in counts} >= set(succeeded):
            return
        time.sleep(0.2)
    raise AssertionError(f"expected one execution of each run, SUCCEEDED; the executions are {counts}")
