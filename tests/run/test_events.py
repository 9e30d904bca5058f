"""Job events: the event of an end that tells the start of its attempt, too."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.events import Checkpointed, EndBase, Failed, Preempted, Started, Succeeded, parse_job_event
from dropforge.run.events import read_job_events as read

RUN = "job-0123456789ab"
NOW = datetime(2026, 11, 27, tzinfo=UTC)
STARTED = Started(run=RUN, attempt=2, sequence=5, time=NOW - timedelta(seconds=1), resumed_step=40, device="cpu")
ENDS = [
    Succeeded(run=RUN, attempt=2, sequence=9, time=NOW, manifest_uri="gs://b/m"),
    Failed(run=RUN, attempt=2, sequence=9, time=NOW, error_class=ErrorClass.DATA, message="3 rows"),
    Preempted(run=RUN, attempt=2, sequence=9, time=NOW, step=41),
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.type)
def test_an_end_tells_everything_about_the_start_that_was_held(end: EndBase) -> None:
    stored = end.with_start(STARTED).model_dump_json().encode()
    first, second = read(stored, RUN)
    assert first == STARTED
    assert second.model_copy(update={"started": None}) == end
    assert read(stored, "other-0123456789ab") == []


@pytest.mark.parametrize("event", [STARTED, Checkpointed(run=RUN, attempt=2, sequence=6, time=NOW, step=1, uri="u")])
def test_no_other_event_has_a_start(event: Started | Checkpointed) -> None:
    start = json.loads(ENDS[0].with_start(STARTED).model_dump_json())["started"]
    with pytest.raises(ValueError, match="started"):
        parse_job_event(json.dumps({**event.model_dump(mode="json"), "started": start}).encode())


def test_the_start_in_an_end_has_no_credentials() -> None:
    started = STARTED.model_copy(update={"device": "hf_abcdefghijklmnopqrstuv"})
    assert b"hf_abc" not in ENDS[0].with_start(started).model_dump_json().encode()


def test_the_start_in_an_end_is_of_the_same_attempt() -> None:
    """A container cannot give another attempt a start."""
    stored = json.loads(ENDS[0].with_start(STARTED).model_dump_json())
    stored["started"]["attempt"] = 1
    assert read(json.dumps(stored).encode(), RUN) == []
