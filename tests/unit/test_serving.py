"""What a service that did not become ready is said to have failed of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from google.cloud import run_v2

from dropforge.errors import CloudError, ErrorClass
from dropforge.serving import cloud_run

FAILED = run_v2.Condition.State.CONDITION_FAILED


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("The user-provided container failed to start and listen on the port", ErrorClass.CODE),
        (
            "Revision is not ready. The user-provided container failed the configured startup probe checks.",
            ErrorClass.CODE,
        ),
        ("You do not have quota for using GPUs without zonal redundancy.", ErrorClass.QUOTA),
        ("Image 'x' not found.", ErrorClass.CONFIG),
    ],
)
def test_a_failed_service_is_classified(monkeypatch: pytest.MonkeyPatch, message: str, expected: ErrorClass) -> None:
    condition = run_v2.Condition(state=FAILED, message=message)
    service = run_v2.Service(labels={"dropforge-run": "r"}, terminal_condition=condition)
    monkeypatch.setattr(cloud_run, "service_name", lambda deployment: "s")
    monkeypatch.setattr(cloud_run.CloudRunService, "_service", lambda self, name: service)
    with pytest.raises(CloudError) as failure:
        cloud_run.CloudRunService().deploy(SimpleNamespace(run="r"))
    assert failure.value.error_class is expected
    assert failure.value.hint
