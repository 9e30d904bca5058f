"""What a sweep leaves in the bucket about itself, for the page Health of the console."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge.base.errors import Malformed
from dropforge.run.store import RunStore
from dropforge.stages.answers import Swept
from dropforge.stages.sweep import findings
from dropforge.stages.sweep.findings import KEPT
from dropforge.stages.sweep.sweep import sweep

from .test_forged import EXPIRED, NOW, World, service


def test_a_sweep_keeps_what_it_did_and_the_next_one_replaces_it() -> None:
    world = World()
    assert findings.read(world.context) is None
    sweep(world.context)
    first = findings.read(world.context)
    assert first is not None
    assert first.deleted == [service(EXPIRED)]
    assert first.ended == NOW
    world.listed = []
    sweep(world.context)
    second = findings.read(world.context)
    assert second is not None
    assert second.deleted == []


def test_a_bucket_that_refuses_the_findings_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: RunStore, name: str, *arguments: Any) -> bool:
        raise PermissionError(name)

    world = World()
    monkeypatch.setattr(RunStore, "write", refuse)
    answer = sweep(world.context)
    assert answer.deleted == [service(EXPIRED)]
    assert findings.read(world.context) is None


def test_findings_have_a_bound() -> None:
    answer = Swept(deleted=[], deleting=[], restarted=[], resubmitted=[], problems=["p"] * (KEPT + 1))
    found = findings.of(answer, NOW)
    assert found.counts["problems"] == KEPT + 1
    assert len(found.problems) == KEPT


def test_findings_of_a_later_version_are_read() -> None:
    world = World()
    found = findings.of(Swept(deleted=["a"], deleting=[], restarted=[], resubmitted=[], problems=[]), NOW)
    world.forge(findings.OBJECT, json.dumps({**json.loads(found.model_dump_json()), "later": 1}).encode())
    assert findings.read(world.context) == found


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"ended": 5}', b'{"ended": "x", "counts": {}}'])
def test_unreadable_findings_are_named(content: bytes) -> None:
    world = World()
    world.forge(findings.OBJECT, content)
    with pytest.raises(Malformed, match="swept"):
        findings.read(world.context)
    sweep(world.context)
    assert findings.read(world.context) is not None
