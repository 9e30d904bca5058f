"""What only a Ray cluster has: machines that its operator replaces within the attempt.

What holds on every target is in test_targets.py, with a Ray that starts quickly and is held to what Ray does by
tests/emulators/kubernetes/test_ray.py.
"""

from __future__ import annotations

from typing import Any

from dropforge.run.record import RunState

from .clusters import Clusters
from .conftest import User
from .targets import PARTS
from .test_runs import assert_clean

TARGET: dict[str, Any] = {"type": "ray", **PARTS["ray"]}
HOSTS = 2


def pods_of(user: User, run: str, node_type: str) -> list[tuple[str, str]]:
    return sorted(pod for pod in Clusters(user.info).pods(run) if f"-{node_type}-" in pod[1])


def take_away(user: User, pod: tuple[str, str]) -> None:
    user.post("_local/kubernetes/faults", {"preempt": {"cluster": pod[0], "pod": pod[1]}})


def test_hosts_and_head_that_are_taken_away_are_replaced_within_the_attempt(user: User) -> None:
    run = user.drop(user.spec("hang-at-first-start", target=TARGET))
    user.wait(run, "TRAINING")
    hosts = pods_of(user, run, "worker")
    assert len(hosts) == HOSTS
    take_away(user, hosts[0])
    # One slice: when one host is lost, all are made again. The driver goes on.
    user.until(lambda: len(now := pods_of(user, run, "worker")) == HOSTS and not set(now) & set(hosts))
    assert user.store.record(run).state is RunState.TRAINING
    (head,) = pods_of(user, run, "head")
    take_away(user, head)  # with the driver: the operator submits the job again
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)
