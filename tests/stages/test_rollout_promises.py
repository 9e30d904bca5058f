"""What a rollout notes only once the platform has done it, and only once."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from dropforge.endpoints.record import RolloutState

from .test_rollout import CANARY, LIMIT, NOW, Deployment, deployment

__all__ = ["deployment"]
MINUTE = timedelta(minutes=1)


def test_the_time_of_a_canary_begins_when_the_platform_has_moved_its_share(deployment: Deployment) -> None:
    deployment.endpoint("WATCHING", r_canary=CANARY)
    deployment.platform.answers["shift"] = False
    assert deployment.advance().status == "PENDING"
    assert deployment.rollout.watched is None
    deployment.platform.answers["shift"], deployment.now = True, NOW + MINUTE
    assert deployment.advance().status == "PENDING"
    assert deployment.rollout.watched == NOW + MINUTE


def test_the_time_of_a_canary_begins_once(deployment: Deployment) -> None:
    """Two calls may note it: the reply about the first one's write was lost."""
    deployment.endpoint("WATCHING", r_canary=CANARY)

    def watched(now: datetime) -> datetime | None:
        deployment.context.endpoints.update("e", lambda record: record.with_share("r", now))
        return deployment.rollout.watched

    assert [watched(NOW), watched(NOW + MINUTE)] == [NOW, NOW]


@pytest.mark.parametrize(
    ("state", "verb", "after"),
    [("SUSPENDING", "suspend", RolloutState.SUSPENDED), ("RETIRING", "delete", RolloutState.RETIRED)],
)
def test_an_end_of_instances_is_noted_once_the_platform_has_ended_them(
    deployment: Deployment, state: str, verb: str, after: RolloutState
) -> None:
    """Until then they cost money, and the record counts that."""
    deployment.endpoint(state, {"SUSPENDING": "suspend", "RETIRING": "retire"}[state], budget=LIMIT)
    deployment.platform.answers[verb] = False
    assert deployment.advance().status == "PENDING"
    assert deployment.rollout.state == state
    assert (deployment.record.suspended, deployment.record.retired) == (None, None)
    deployment.platform.answers[verb] = True
    assert deployment.advance().status == after
    assert deployment.rollout.state is after
