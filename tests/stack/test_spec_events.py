"""Job events out of order, and specs that are deleted or overwritten before submit reads them."""

from __future__ import annotations

import pytest

from dropforge.base import names
from dropforge.run.record import RunState

from .conftest import User
from .test_runs import assert_clean, deliver_upload, states


def test_the_order_of_job_events_changes_nothing(user: User) -> None:
    run = user.drop(user.spec("backwards"))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    assert_clean(user, run)


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_spec_that_was_deleted_or_overwritten_before_submit_is_rejected(user: User, overwritten: bool) -> None:
    """The event names a generation that does not exist: the bucket has another generation, or no object."""
    bucket, spec = user.settings.specs_bucket, f"specs/gone-{overwritten}.json"
    if overwritten:
        user.wait(user.drop(user.spec(), spec))
    assert deliver_upload(user, bucket, spec, "1234567") == 204
    record = user.wait(names.run_id_of_object(bucket, spec, "1234567"))
    assert record.state is RunState.REJECTED
    assert "deleted or overwritten" in str(record.problems[0]["message"])
