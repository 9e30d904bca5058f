"""The clients that only a deployment in the cloud uses."""

from __future__ import annotations

import google.auth
import pytest
from google.auth.credentials import AnonymousCredentials

from dropforge.cloud.clients import Clients
from dropforge.stages.sweep import orphans, sweep


def test_every_thread_of_a_sweep_reuses_its_connection_to_cloud_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(google.auth, "default", lambda *_, **__: (AnonymousCredentials(), "p1"))
    storage_client = Clients().storage()
    assert storage_client._http.get_adapter("https://storage.googleapis.com")._pool_maxsize >= max(
        sweep.WORKERS, orphans.WORKERS
    )
