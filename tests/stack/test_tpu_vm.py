"""TPU VMs only: preemption, reboot, stockout, a killed startup script, and serving on the training VM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from dropforge.base import names
from dropforge.run.record import RunState
from dropforge.stages.completion import completion_problem
from dropforge_local.stack.logs import read_log

from ..deployments import here
from ..stage_calls import inspect
from .conftest import User
from .targets import PARTS
from .test_crash_windows import ME, URL, end, eventually, launched
from .test_faults import kill
from .test_runs import GATE, assert_clean

pytestmark = pytest.mark.slow

TARGET: dict[str, Any] = {"type": "tpu_vm", **PARTS["tpu_vm"]}


@pytest.fixture
def faults(user: User) -> Iterator[Any]:
    """Yield a function that switches on faults of the Cloud TPU emulator; switch them off after the test."""

    def switch(**body: Any) -> None:
        user.post("_local/tpu/faults", body)

    yield switch
    switch(stockout=[], preempt_next=None, fail_next=[])


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at-once"])
def test_after_max_wait_in_a_zone_without_capacity_the_next_zone_trains(user: User, faults: Any, queued: bool) -> None:
    faults(stockout=["us-west1-c"])
    placements = [{"zone": "us-west1-c", "max_wait": "2s"}, {"zone": "us-west4-a"}]
    run = user.drop(user.spec(target={"type": "tpu_vm", "queued": queued, "placements": placements}))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.region for a in record.attempts] == ["us-west1-c", "us-west4-a"]
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["stockout", None]
    assert_clean(user, run)


def test_a_machine_that_is_preempted_before_it_trains_is_replaced(user: User, faults: Any) -> None:
    faults(preempt_next={"after_seconds": 0})
    run = user.drop(user.spec("hang-once", target=TARGET))  # a run that does not hang may end before the preemption
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["preempted", None]
    assert_clean(user, run)


def test_a_preemption_after_training_does_not_fail_the_run(user: User) -> None:
    """The trainer sends no job event about its end."""
    run = launched(user, "silent", target=TARGET)
    written = names.machine_object(run, 1, "status.json")
    user.until(lambda: written in user.store.names(written), 60)
    user.preempt(run)
    assert eventually(lambda: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"
    end(user, run)


def test_a_rebooted_machine_continues_with_its_disk(user: User) -> None:
    run = user.drop(user.spec("hang-at-first-boot", target=TARGET))
    user.wait(run, "TRAINING")
    user.post("_local/tpu/faults", {"reboot": user.machine(run)})
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)


def test_training_survives_a_kill_of_the_startup_script(user: User) -> None:
    run = user.drop(user.spec("slow", target=TARGET))
    user.wait(run, "TRAINING")
    _script(user, run).kill()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)


def test_a_machine_without_processes_is_stuck(user: User) -> None:
    """No process is left that could report the end, and the node is READY."""
    limits = {"stuck_after": "10s", "on_stuck": "restart"}
    run = user.drop(user.spec("hang-once", target=TARGET, limits=limits))
    user.wait(run, "TRAINING")
    script = _script(user, run)
    for process in [script, *script.children(recursive=True)]:
        process.kill()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["stuck", None]
    assert_clean(user, run)


def test_a_machine_continues_while_the_stack_is_dead(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    run = user.drop(user.spec("slow", target=TARGET))
    user.wait(run, "TRAINING")
    kill(user)
    user = own_stack()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)
    # The machine's script went on: nothing started it again. Its exit status says nothing, because the end of the run
    # deletes the machine, perhaps while the script still reports.
    log = read_log(user.info.http, _node(user, run))
    assert log
    assert log.count(f"run {run}, attempt 1: train on") == 1


SERVE_ON_TRAINING_VM = {"type": "training_vm", "ttl": "1h"}


def test_the_training_vm_serves_the_model(user: User) -> None:
    run = user.drop(user.spec(target=TARGET, serve=SERVE_ON_TRAINING_VM))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert record.endpoint
    assert record.endpoint.service == user.training(run)
    assert completion_problem(here().cloud, record.endpoint.url, "noop") == ""
    assert len(user.resources(run)) == 3  # a queued resource, its node, a disk
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert_clean(user, run)


def test_a_model_that_fails_its_gate_is_never_served(user: User) -> None:
    run = user.drop(user.spec("poor", target=TARGET, serve=SERVE_ON_TRAINING_VM, evaluation=GATE))
    record = user.wait(run)
    assert record.error
    assert record.error.error_class == "gate"
    assert_clean(user, run)
    log = read_log(user.info.http, _node(user, run))
    assert log
    assert f"run {run}: serve" not in log


def _node(user: User, run: str) -> str:
    """Return the name of a run's node; the node may be deleted."""
    return next(entry.name for entry in user.store.ledger(run).entries if "/nodes/" in entry.name)


def _script(user: User, run: str) -> psutil.Process:
    """Return the process of the startup script of a run's machine."""
    machine = user.machine(run).rsplit("/", 1)[1]
    (script,) = [process for process in psutil.process_iter() if _is_script(process, machine)]
    return script


def _is_script(process: psutil.Process, machine: str) -> bool:
    """Return whether the process is the shell that init.py started, and not a child of that shell."""
    try:
        runs_script = any(word.endswith("/startup-script") and f"/{machine}-" in word for word in process.cmdline())
        return (
            runs_script
            and "init.py" in " ".join((process.parent() or process).cmdline())
            and process.name() != "python"
        )
    except psutil.Error:
        return False
