"""What `dropforge audit` calls a difference, without a cloud; tests/stack/test_sweep.py has it with one."""

from __future__ import annotations

from unittest.mock import Mock

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.cloud.kubernetes import CLUSTER
from dropforge.cloud.listing import Listed
from dropforge.platforms.gke.train import JOB
from dropforge.run.record import Ledger, LedgerEntry, Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.stages.sweep.audit import MISSING, Difference, compare

RUN = "job-0123456789ab"
OWN = f"projects/p1/locations/us-central1/clusters/{names.training_name(RUN, 1)}"
INSIDE = f"{OWN}/k8s/namespaces/dropforge/batch/jobs/{names.training_name(RUN, 1)}"


def test_what_is_in_a_cluster_of_its_attempt_is_there_as_long_as_the_cluster() -> None:
    now = utc_now()
    made = {OWN: CLUSTER, INSIDE: JOB}
    entries = [
        LedgerEntry(kind=kind, name=name, attempt=1, state=ResourceState.CREATED, intended=now)
        for name, kind in made.items()
    ]
    ledger = Ledger(run=RUN, entries=entries)
    history = [Transition(state=RunState.TRAINING, time=now)]
    record = Record(run=RUN, name="n", source="s", state=RunState.TRAINING, created=now, history=history)
    store = Mock(RunStore, ledger=lambda _: ledger, find=lambda _: record)
    assert compare(store, {RUN: ledger}, [Listed(CLUSTER, OWN, names.labels(RUN, {}))]) == []
    missing = [Difference(MISSING, RUN, kind, name) for name, kind in made.items()]
    assert compare(store, {RUN: ledger}, []) == sorted(missing)
