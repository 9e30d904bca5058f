"""Events out of order, and specs that change or vanish while they are handled."""

from __future__ import annotations

import pytest

from dropforge.base import names
from dropforge.run.record import RunState

from .conftest import User
from .test_runs import assert_clean, deliver_upload, states


def test_events_in_any_order_change_nothing(user: User) -> None:
    run = user.drop(user.spec("backwards"))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    assert_clean(user, run)


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_spec_gone_before_it_was_read_is_rejected(user: User, overwritten: bool) -> None:
    """Its event arrives when another generation, or nothing, is there; the generation that it names never was."""
    bucket, spec = user.settings.specs_bucket, f"specs/gone-{overwritten}.json"
    if overwritten:
        user.wait(user.drop(user.spec(), spec))
    assert deliver_upload(user, bucket, spec, "1234567") == 204
    record = user.wait(names.run_id_of_object(bucket, spec, "1234567"))
    assert record.state is RunState.REJECTED
    assert "deleted or overwritten" in str(record.problems[0]["message"])
