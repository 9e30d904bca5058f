"""The clients that only a deployment in the cloud uses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

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


def test_all_clients_of_a_process_share_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[AnonymousCredentials] = []

    def default(**_: object) -> tuple[AnonymousCredentials, str]:
        looked_up.append(AnonymousCredentials())
        return looked_up[-1], "p1"

    monkeypatch.setattr(google.auth, "default", default)
    clients = Clients({"DROPFORGE_PROJECT": "p1"})
    sessions = [clients.storage()._http, clients.callbacks(), clients.compute()[0], clients.run_rest()[0]]
    assert all(session is sessions[0] for session in sessions)
    for made in (clients.run_jobs(), clients.secrets(), clients.publisher(), clients.workflow_executions()):
        made.transport.close()
    assert len(looked_up) == 1


def test_threads_that_need_a_client_at_once_get_the_same_client() -> None:
    clients, barrier = Clients({"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}), Barrier(8)

    def make(_: int) -> object:
        barrier.wait(60)
        return clients.storage()

    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, threads.map(make, range(8))))) == 1
