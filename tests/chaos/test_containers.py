"""Simulations in which the real code of containers/ trains and starts servers: faults strike all that a container asks.

Each way to break that code below must break a promise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from containers.common import outcome
from containers.common.checkpoints import CheckpointStore
from containers.common.errors import forbidden
from dropforge.base import names
from dropforge.run import artifacts
from dropforge.stages import access
from dropforge_local.chaos import container_clients, priced
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.faults import Strike
from dropforge_local.chaos.history import History
from dropforge_local.chaos.simulation import run, run_struck
from dropforge_local.chaos.world import World

SEEDS = range(40)
# What a container or a server asks, and the name of the call.
ASKED = {
    "an identity token": r"metadata\.identity",
    "a token": "access",
    "the list of objects": r"storage\.list",
    "an upload of a checkpoint": r"storage\.put checkpoints/.*/optimizer\.pt",
    "a marker": r"storage\.put checkpoints/.*/_COMPLETE",
    "the series": r"storage\.put models/.*/series/.*",
    "the export": r"storage\.put models/.*/model\.safetensors",
    "the manifest": r"storage\.put models/.*/MANIFEST\.json",
    "a download": r"storage\.get (checkpoints|models)/.*/(adapter|model)\.safetensors",
    "an event": r"pubsub\.publish job-events",
}


@cache
def life(seed: int) -> History:
    return run(seed, real_containers=True)


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 10))
def test_seeds_with_real_containers_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 10) for problem in check(life(seed))]
    assert problems == []


def test_a_seed_with_real_containers_has_the_same_history_again() -> None:
    assert run(5, real_containers=True).digest == life(5).digest != run(5).digest


@pytest.mark.parametrize("fault", ["refused", "lost", "late", "stalled", "killed_before", "killed_after"])
def test_no_single_fault_of_what_a_container_asks_breaks_a_promise(fault: str) -> None:
    """`dropforge chaos --containers --each` strikes all effects."""
    problems = []
    for what, call in ASKED.items():
        effect = next(at for at, name in calls_of_containers().items() if re.fullmatch(call, name))
        history = run_struck(Strike(effect, fault), real_containers=True)
        assert list(history.of("struck")) or fault == "late", what  # only a write can be late
        problems += [f"{what}: {problem}" for problem in check(history)]
    assert problems == []


@cache
def calls_of_containers() -> dict[int, str]:
    """What containers ask in a run that no fault strikes, by the number of the effect."""
    calls: dict[int, str] = {}
    effect = World.effect

    def noted(world: World, name: str, *arguments: Any, **options: Any) -> Any:
        if re.match("train-|serve-", world.scheduler.current.name):
            calls[world.effects + 1] = name
        return effect(world, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "effect", noted)
        assert check(run_struck(Strike(0, ""), real_containers=True)) == []
    return calls


def _marker_before_the_files(patch: pytest.MonkeyPatch) -> None:
    def save(store: Any, step: int, local: Path) -> None:
        files = [artifacts.describe_file(path, path.name) for path in sorted(local.iterdir())]
        artifacts.complete_checkpoint(store._client, store._job.bucket, store._job.run, step, files, {}, store._job.key)

    patch.setattr(CheckpointStore, "_save", save)


def _deletes_before_the_next_is_complete(patch: pytest.MonkeyPatch) -> None:
    complete = artifacts.complete_checkpoint

    def delete_first(client: Any, bucket: str, run: str, *rest: Any) -> Any:
        artifacts.delete_blobs(list(client.list_blobs(bucket, prefix=artifacts.checkpoint_prefix(run))))
        return complete(client, bucket, run, *rest)

    patch.setattr(artifacts, "complete_checkpoint", delete_first)


def _starts_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "resume", lambda store, directory: None)


def _what_passes_is_final(patch: pytest.MonkeyPatch) -> None:
    """As it was on 2026-11-28: one 503 of `access` ended a run as a missing permission."""
    patch.setattr(container_clients, "may_pass", lambda error: False)
    patch.setattr(outcome, "classify", lambda error: forbidden(str(error), ""))


def _token_for_too_little(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(access, "checkpoint_prefix", lambda run: f"checkpoints/{run}-elsewhere/")


def _manifest_without_its_files(patch: pytest.MonkeyPatch) -> None:
    upload = artifacts.upload_directory

    def forget_one(client: Any, directory: Path, uri: str, *rest: Any) -> Any:
        files = upload(client, directory, uri, *rest)
        if "/models/" in uri:
            bucket, prefix = names.parse_gs_uri(uri)
            client.bucket(bucket).blob(f"{prefix}/{files[0].path}").delete()
        return files

    patch.setattr(artifacts, "upload_directory", forget_one)


def _every_placement_at_the_price_of_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(priced._Dearer, "price", lambda target, spec, placement=0: target._target.price(spec, placement))


BREAKAGES: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("checkpoints_are_kept", _marker_before_the_files),
    ("checkpoints_are_kept", _deletes_before_the_next_is_complete),
    ("checkpoints_are_kept", _starts_from_the_beginning),
    ("containers_fail_for_a_reason", _what_passes_is_final),
    ("containers_fail_for_a_reason", _token_for_too_little),
    ("models_are_whole", _manifest_without_its_files),
    ("prices_are_of_the_placement", _every_placement_at_the_price_of_the_first),
]


@pytest.mark.parametrize(("rule", "breaks"), BREAKAGES, ids=[breaks.__name__.strip("_") for _, breaks in BREAKAGES])
def test_a_promise_that_the_code_of_containers_breaks_is_reported(
    rule: str, breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert any(problem.rule == rule for seed in SEEDS for problem in check(run(seed, real_containers=True)))
