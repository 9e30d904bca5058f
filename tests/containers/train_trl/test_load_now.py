"""The load that train_trl reports of its GPU. PyTorch is made to say that the machine has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from containers.common.report import Load


@pytest.fixture
def load_now(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Load]:
    import torch

    from containers.train_trl import callbacks

    monkeypatch.setattr(callbacks, "resident_mib", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    return callbacks.load_now


def test_the_driver_tells_how_busy_the_gpu_is(load_now: Callable[[], Load], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.utilization", lambda: 57)
    assert load_now() == Load(3, 5, 0.57)


def test_a_driver_that_tells_nothing_stops_no_training(load_now: Callable[[], Load]) -> None:
    """Here NVML finds no driver: the real package raises its own error."""
    assert load_now() == Load(3, 5, None)
