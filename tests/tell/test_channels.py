"""Each channel gets each message once: a retry reaches only the channels that did not take it."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.base.errors import CloudError
from dropforge.context import Context
from dropforge.run.record import Notice, Record, RunState
from dropforge.tell import channels, everybody
from dropforge.tell.channel import Failure

from ..deployments import Memory, context_with
from .stories import RUN, news_of, record_of, spec_of


class Listener:
    """A channel that answers with `failures` in turn, and then takes everything."""

    def __init__(self, name: str, *failures: Failure) -> None:
        self.NAME, self.failures, self.heard = name, list(failures), list[str]()

    def secrets_of(self, spec: Any) -> dict[str, str]:
        return {}

    def address_of(self, spec: Any, settings: Any) -> str:
        return "somewhere"

    def send(self, context: Context, address: Any, news: Any) -> Failure | None:
        self.heard.append(news.event.id.removeprefix(f"{RUN}/"))
        return self.failures.pop(0) if self.failures else None


DOWN, WRONG = Failure("it is down", may_pass=True), Failure("it is wrong", may_pass=False)


class Publisher:
    def publish(self, *_: Any, **__: Any) -> Publisher:
        return self

    def result(self, timeout: float) -> str:
        return "id"


def context_of(monkeypatch: pytest.MonkeyPatch, record: Record, *listeners: Listener) -> Context:
    monkeypatch.setattr(channels, "CHANNELS", listeners)
    context = context_with(storage=Memory(), publisher=Publisher())
    assert context.store.create(record)
    return context


def test_a_retry_of_an_end_reaches_only_the_channel_that_was_down(monkeypatch: pytest.MonkeyPatch) -> None:
    well, wrong, down = Listener("well"), Listener("wrong", WRONG, WRONG), Listener("down", DOWN, DOWN)
    context = context_of(monkeypatch, record_of(RunState.FAILED), well, wrong, down)
    for _ in range(2):
        with pytest.raises(CloudError, match="it is down"):
            channels.send_state(context, context.store.record(RUN))
    channels.send_state(context, context.store.record(RUN))
    assert [len(listener.heard) for listener in (well, wrong, down)] == [1, 1, 3]
    assert set(well.heard + down.heard) == {"0/failed"}
    assert context.store.record(RUN).notices == ["0/failed@well", "0/failed@wrong"]


def test_a_message_that_every_channel_took_costs_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(monkeypatch, record_of(RunState.FAILED), Listener("a"), Listener("b", WRONG))
    channels.send_state(context, context.store.record(RUN))
    assert context.store.record(RUN).notices == []


def test_a_state_that_is_no_end_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    down = Listener("a", DOWN)
    context = context_of(monkeypatch, record_of(RunState.ACCEPTED), down)
    channels.send_state(context, context.store.record(RUN))
    assert down.heard == ["0/accepted"]


def test_a_retry_of_a_notice_reaches_only_the_channel_that_was_down(monkeypatch: pytest.MonkeyPatch) -> None:
    well, down = Listener("well"), Listener("down", DOWN)
    context = context_of(monkeypatch, record_of(RunState.ACCEPTED), well, down)
    notice = Notice("budget-50", "has used 50 %", "text")
    record = context.store.record(RUN)
    for _ in range(3):
        record = everybody.warn(context, record, spec_of(), notice)
    assert (well.heard, down.heard) == (["notice/budget-50"], ["notice/budget-50"] * 2)
    assert record.notices == ["notice/budget-50@well", "budget-50"]


def test_every_channel_has_a_name_of_its_own() -> None:
    names = [channel.NAME for channel in channels.CHANNELS]
    assert len(set(names)) == len(names)


def test_a_message_says_which_event_it_reports() -> None:
    assert news_of(RunState.CANCELLED).event.id == f"{RUN}/0/cancelled"
