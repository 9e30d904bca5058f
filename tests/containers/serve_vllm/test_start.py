"""The files that a server reads before it starts: the manifest, with its proof, and the adapters of other runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from containers.serve_vllm import adapters
from containers.serve_vllm.adapters import Adapter, download, unfit
from containers.serve_vllm.serve import find_model
from dropforge.base.errors import DropforgeError
from dropforge.cloud.run_access import REQUEST_VARIABLE
from dropforge.run.artifacts import Manifest, Source, files_digest, upload_directory, write_manifest
from dropforge_local.chaos.storage import Storage
from dropforge_local.chaos.world import World

RUN, KEY, OTHER_KEY = "demo-0123456789ab", "00" * 32, "11" * 32
SOURCE = Source(uri="gs://data/x", revision="main")


def committed(client: Any, directory: Path, run: str = RUN, key: str = KEY) -> Manifest:
    """The manifest of a small model with an adapter, both in the bucket."""
    for name, text in (("model/config.json", "{}"), ("adapter/adapter_config.json", '{"r": 8}')):
        path = directory / run / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    files = upload_directory(client, directory / run, f"gs://runs/models/{run}/attempt-1")
    manifest = Manifest(
        run=run,
        attempt=1,
        created=datetime.now(UTC),
        spec_sha256="0" * 64,
        base=SOURCE,
        dataset=SOURCE,
        serve_path="attempt-1/model",
        adapter_path="attempt-1/adapter",
        metrics={},
        files=[file.model_copy(update={"path": f"attempt-1/{file.path}"}) for file in files],
    )
    return write_manifest(client, "runs", manifest, key)


@pytest.fixture
def client() -> Any:
    return Storage(World(0), ("runs",))


def test_a_server_finds_the_committed_model(client: Any, tmp_path: Path) -> None:
    manifest = committed(client, tmp_path)
    assert find_model(client, f"gs://runs/models/{RUN}", KEY) == manifest


def test_a_server_without_a_committed_model_says_so(client: Any) -> None:
    with pytest.raises(DropforgeError, match=r"has no MANIFEST\.json"):
        find_model(client, f"gs://runs/models/{RUN}", KEY)


def test_a_manifest_without_the_proof_of_the_run_is_not_served(client: Any, tmp_path: Path) -> None:
    committed(client, tmp_path, key=OTHER_KEY)
    with pytest.raises(DropforgeError, match=r"has no MANIFEST\.json"):
        find_model(client, f"gs://runs/models/{RUN}", KEY)


@pytest.mark.parametrize("change", ["replaced", "deleted", "added"])
def test_files_that_nobody_committed_are_not_served(client: Any, tmp_path: Path, change: str) -> None:
    committed(client, tmp_path)
    name = f"models/{RUN}/attempt-1/model/{'other' if change == 'added' else 'config'}.json"
    if change == "deleted":
        client.remove("runs", name)
    else:
        client.put("runs", name, b'{"a": 1}')
    with pytest.raises(DropforgeError, match="differs from its manifest"):
        find_model(client, f"gs://runs/models/{RUN}", KEY)


class Asked:
    """Clients whose storage tells with which run's access it is asked."""

    def __init__(self, client: Any, environment: dict[str, str], asked: list[str]) -> None:
        self.environment, self._client, self._asked = environment, client, asked

    def storage(self) -> Any:
        self._asked.append(json.loads(self.environment[REQUEST_VARIABLE])["run"])
        return self._client


def test_an_adapter_is_read_with_the_access_of_its_run(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, asked = committed(client, tmp_path / "made", "other-0123456789ab"), list[str]()
    monkeypatch.setattr(adapters, "Clients", lambda environment: Asked(client, environment, asked))
    digest = files_digest(manifest, "attempt-1/adapter")
    adapter = Adapter(name="sql", run=manifest.run, digest=digest, proof="5")
    own: Any = Asked(client, {REQUEST_VARIABLE: json.dumps({"run": RUN, "proof": "7"})}, asked)
    (loaded,) = download(own, "runs", (adapter,), tmp_path / "read")
    assert (loaded.name, loaded.rank, asked) == ("sql", 8, [manifest.run])
    with pytest.raises(DropforgeError, match=r"expected 000000000000… of the revision"):
        download(own, "runs", (adapter.model_copy(update={"digest": "0" * 64}),), tmp_path / "again")


@pytest.mark.parametrize(
    ("config", "named"),
    [({"r": 8, "use_dora": True}, "use_dora"), ({"r": 8, "init_lora_weights": "pissa"}, "pissa"), ({"r": 0}, "r: 0")],
)
def test_an_adapter_that_vllm_computes_otherwise_is_refused(config: dict[str, Any], named: str) -> None:
    assert named in unfit(config)
    assert unfit({"r": 8}) == ""
