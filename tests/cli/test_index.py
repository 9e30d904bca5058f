"""`dropforge index rebuild` writes the missing summaries, and names the wrong ones."""

from __future__ import annotations

import json

from dropforge.base import names
from dropforge.run.record import RunState

from .conftest import Deployed

OLD, BROKEN = "old-0123456789ab", "broken-0123456789ab"


def test_old_records_get_their_summaries_once(deployed: Deployed) -> None:
    deployed.record(OLD, RunState.SUCCEEDED)
    deployed.spec(OLD)
    checked = deployed.run("index", "rebuild", "--check")
    assert checked.exit_code == 1
    assert "missing: 1 (old records: lists read each of them), found" in checked.stdout
    written = deployed.run("index", "rebuild")
    assert written.exit_code == 0
    assert "missing: 1 (old records: lists read each of them), written" in written.stdout
    assert deployed.run("index", "rebuild", "--check").stdout == "1 runs: 1 summaries were right\n"


def test_a_record_that_cannot_be_read_is_named(deployed: Deployed) -> None:
    deployed.store.put_new(names.record_object(BROKEN), b"{}")
    result = deployed.run("index", "rebuild", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert (told["runs"], told["unreadable"], told["right"]) == (1, 1, 0)
    assert told["findings"][0]["run"] == BROKEN


def test_a_summary_that_somebody_forged_is_named_and_mended(deployed: Deployed) -> None:
    deployed.record(OLD, RunState.REJECTED)
    deployed.spec(OLD)
    deployed.run("index", "rebuild")
    blob = deployed.store.bucket.get_blob(names.record_object(OLD))
    blob.metadata = {key: value.replace("REJECTED", "SUCCEEDED") for key, value in blob.metadata.items()}
    blob.patch()
    assert "REJECTED" in deployed.run("runs").stdout
    assert f"wrong: the summary of {OLD}" in deployed.run("index", "rebuild").stderr
    assert deployed.run("index", "rebuild", "--check").exit_code == 0
