"""The phase plan, checked in the container: the model's configuration comes first, and its weights only if all fits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from dropforge.base.log import log
from dropforge.fit.configuration import NoConfiguration, read_shape
from dropforge.fit.plan import phase_problems
from dropforge.spec import JobSpec
from dropforge.spec.machine import Machine

from .errors import config_error
from .model import fetch_config


def check(spec: JobSpec, client: Any, directory: Path, machine: Machine) -> None:
    """Refuse a run whose phases do not fit `machine`, which keeps its files below `directory`. Raises JobError."""
    config = json.loads(fetch_config(spec, client, directory / "config").read_text())
    try:
        shape = read_shape(config, spec.model.source)
    except NoConfiguration as error:  # its class can still be counted once its files are here
        log(f"the phases are not checked: {error}", stage="train")
        return
    problems = phase_problems(spec, shape, with_real_disk(machine, directory))
    target = [problem for problem in problems if not problem.pointer.startswith("/serve")]
    if target:
        first = target[0]
        raise config_error(
            f"{spec.model.source}: {'; '.join(f'{each.message}: {each.found}' for each in target)}",
            f"set {first.expected}",
        )


def with_real_disk(machine: Machine, directory: Path) -> Machine:
    """The machine with the real size of the disk for `directory`, if that is less than the machine should have."""
    if machine.files_in_memory or machine.disk_bytes is None:
        return machine
    here = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())  # of an earlier attempt
    return replace(machine, disk_bytes=min(machine.disk_bytes, shutil.disk_usage(directory).free + here))
