"""A platform that forgets a member is refused when it is registered, and an adapter when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dropforge.base.errors import DropforgeError
from dropforge.platforms.platform import Serving, Training
from dropforge.platforms.serving import Server
from dropforge.platforms.training import Target
from dropforge.spec import registry

SOURCE = """
from typing import Literal

from dropforge.platforms.platform import Platform, Serving, Training
from dropforge.platforms.training import Target
from dropforge.spec.job_spec import ServeSpec, TargetSpec
from dropforge.spec.parts import Placement


class HalfTarget(TargetSpec):
    type: Literal["half"] = "half"
    {placements}

    {accelerators}


class HalfServe(ServeSpec):
    type: Literal["half"] = "half"
    max_model_len: int = 1
    max_num_seqs: int = 1

    def machine(self, job):
        return None


class Half(Target):
    def regions(self, spec):
        return []


class Structural:
    def region(self, deployment):
        return ""


PLATFORM = Platform(
    name="half",
    training=Training(HalfTarget, "{name}:Half", kinds=("half/Job",)),
    serving=(Serving(HalfServe, "{name}:Structural"),)[:{servers}],
)
"""
PLACEMENTS, ACCELERATORS = "placements: list[Placement] = []", "accelerators = property(lambda self: None)"


def platform(folder: Path, placements: str, accelerators: str, servers: int) -> str:
    """A module with a platform that forgets some members; its name."""
    name = f"half_{folder.name}"
    text = SOURCE.format(placements=placements, accelerators=accelerators, servers=servers, name=name)
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.mark.parametrize(
    ("placements", "accelerators", "servers", "lacks"),
    [
        (PLACEMENTS, "", 0, "HalfTarget lacks accelerators, machine;"),
        (PLACEMENTS, ACCELERATORS, 0, "HalfTarget lacks machine;"),
        ("", "accelerators = machine = property(lambda self: None)", 0, "HalfTarget lacks placements;"),
        (
            PLACEMENTS,
            "accelerators = machine = property(lambda self: None)",
            1,
            "HalfServe lacks max_instances, min_instances, startup_timeout, ttl;",
        ),
    ],
)
def test_a_platform_that_forgets_a_member_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placements: str, accelerators: str, servers: int, lacks: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(registry.VARIABLE, f"half={platform(tmp_path, placements, accelerators, servers)}")

    with pytest.raises(DropforgeError) as caught:
        registry.platforms.__wrapped__()

    assert lacks in str(caught.value)


def test_an_adapter_that_forgets_a_member_is_refused_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    name = platform(tmp_path, PLACEMENTS, ACCELERATORS, 1)
    (target, server) = registry.platforms()[0].parts[:2]
    assert isinstance(target, Training)
    assert isinstance(server, Serving)

    with pytest.raises(DropforgeError, match="lacks inspect, listed, price, provision, resources, teardown;"):
        Training(target.spec, f"{name}:Half", ()).load()
    with pytest.raises(
        DropforgeError, match="lacks deploy, exists, listed, price, resources, teardown, why_not_ready;"
    ):
        Serving(server.spec, f"{name}:Structural").load()


def test_every_adapter_of_this_repository_names_its_protocol() -> None:
    for declared in registry.platforms():
        for part in declared.parts:
            assert (Target if isinstance(part, Training) else Server) in type(part.load()).__mro__
