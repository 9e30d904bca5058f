"""The series that hostile trainers forge: each is well-formed or broken as it should be, and none counts."""

from __future__ import annotations

import zlib

import pytest

from dropforge.run.proof import is_document_proved
from dropforge.run.series import MAX_BYTES, decoded, series_object
from dropforge_local.chaos.checker import check, hostile_does_nothing, training_is_reported
from dropforge_local.chaos.forged_series import broken_series, series_of
from dropforge_local.chaos.forgeries import STEP, is_told
from dropforge_local.chaos.history import History
from dropforge_local.chaos.lives import read
from dropforge_local.chaos.simulation import run

RUN, OTHER, KEY, WRONG = "job-0123456789ab", "job-fedcba987654", "5" * 64, "6" * 64
NOW = 1.8e9
FOOLED = 28  # a seed in which a function reads a forged series before the attempt has one of its own
PROVED = 13  # of the broken ones: they fail only by what they contain


def test_no_forged_series_is_one() -> None:
    """Only the key of the run makes the well-formed series count; no key makes the broken ones count."""
    assert decoded(series_of(RUN, 2, NOW, KEY), RUN, 2, KEY) is not None
    for key in (WRONG, ""):
        assert decoded(series_of(RUN, 2, NOW, key), RUN, 2, KEY) is None
    assert decoded(series_of(RUN, 2, NOW, KEY), OTHER, 2, KEY) is None
    assert decoded(series_of(RUN, 2, NOW, KEY), RUN, 3, KEY) is None
    broken = broken_series(RUN, 2, KEY)
    assert [at for at, data in enumerate(broken) if decoded(data, RUN, 2, KEY) is not None] == []
    assert len(set(broken)) == len(broken)
    documents = [zlib.decompress(data, wbits=zlib.MAX_WBITS | 16) for data in broken[:PROVED]]
    assert all(is_document_proved(KEY, series_object(RUN, 2), document) for document in documents)
    assert max(map(len, broken)) > MAX_BYTES


def test_the_checker_finds_a_forged_step_in_what_a_function_wrote() -> None:
    history = History(0)
    history.add(1.0, "write", {"name": f"runs/{RUN}/record.json", "content": {"error": f"it is at step {STEP}"}})
    assert list(hostile_does_nothing(history))
    assert not is_told({"error": "it is at step 9"})


def test_the_checker_finds_a_forged_series_that_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of proofs, a forged series makes an attempt TRAINING that still waits for its machine."""
    monkeypatch.setattr("dropforge.run.series.is_document_proved", lambda *_: True)
    assert {problem.rule for problem in check(run(FOOLED))} == {"training_is_reported"}


@pytest.mark.parametrize(("reported", "problems"), [(True, 0), (False, 1)])
def test_the_checker_finds_a_run_that_trains_before_its_container_has_reported(reported: bool, problems: int) -> None:
    history = History(0)
    if reported:
        history.add(1.0, "told", {"run": RUN, "attempt": 1, "sequence": 1, "type": "started", "step": None})
    record = {"state": "TRAINING", "history": [{"state": "TRAINING", "attempt": 1}]}
    history.add(2.0, "write", {"name": f"runs/{RUN}/record.json", "replaced": 1, "content": record})
    history.add(3.0, "end", {"living": [], "effects": 0})
    assert len(list(training_is_reported(read(history)[RUN]))) == problems
