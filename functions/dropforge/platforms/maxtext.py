"""The checks of the targets that train with MaxText on TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dropforge.base.errors import SpecProblem
from dropforge.base.settings import Settings
from dropforge.spec.parts import Wrong

if TYPE_CHECKING:
    from dropforge.spec import JobSpec


# What MaxText 0.2.5 has for settings of which TRL has more.
_ABLE = {
    "lr_scheduler_type": ("cosine", "linear", "constant", "constant_with_warmup"),
    "optim": ("adamw_torch_fused",),
    "neftune_noise_alpha": (None,),
}


def check_training(job: JobSpec) -> None:
    """Raise Wrong unless MaxText can train as the spec says: every weight, with its own AdamW and schedules."""
    if (adapter := job.training.adapter.type) != "none":
        given = "training" in job.model_fields_set and "adapter" in job.training.model_fields_set
        pointer = "/training/adapter/type" if given else "/training"
        raise Wrong(pointer, "on TPUs every weight is trained", adapter, "'none'")
    for name, able in _ABLE.items():
        if (value := getattr(job.training, name)) not in able:
            expected = " or ".join("no such field" if each is None else repr(each) for each in able)
            raise Wrong(f"/training/{name}", "MaxText, which trains on TPUs, does not have this", value, expected)


def check_image(settings: Settings, setting: str, pointer: str, kind: str) -> Iterator[SpecProblem]:
    """The problem that the deployment lacks an image for TPUs, if it does; `setting` is the image's field."""
    if not getattr(settings, setting):
        role, other = ("training", "target") if setting.startswith("train") else ("serving", "endpoint")
        expected = f"another {other}, or a deployment with DROPFORGE_{setting.upper()}"
        yield SpecProblem(pointer, f"the deployment has no {role} image for TPUs", repr(kind), expected)
