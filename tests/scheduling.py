"""How `make test` divides the suite between three workers on two cores.

A training alone keeps both cores busy, and a stack mostly waits. So one worker takes the files that compute, and the
others those that wait; whoever has no more of its own takes from the others' end. What computes is niced: a test that
waits for something gets a core when that has come. A file stays whole, for its fixtures; and what computes shares those
of the session. Of what computes, those that need MaxText's environment, which is made beside the first tests
(conftest.py), are not the first.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadfile import LoadFileScheduling

COMPUTES = "gw0"  # the worker, as xdist calls it
NICENESS = 5  # a third of the weight of what is not nice
COMPUTE = (
    "tests/containers/train_trl/test_fsdp.py",
    "tests/containers/train_trl/test_train.py",
    "tests/containers/train_ray/test_train_ray.py",
    "tests/containers/train_maxtext/test_maxtext.py",
    "tests/cli/test_demo.py",
    "tests/emulators/kubernetes/test_ray.py",
    "tests/containers/serve_vllm/test_serve.py",
    "tests/containers/common/test_chat.py",
    "tests/containers/serve_vllm/test_engine.py",
    "tests/containers/train_trl/test_launch.py",
    "tests/containers/train_maxtext/test_maxtext_image.py",
    "tests/containers/train_maxtext/test_maxtext_parts.py",
    "tests/contract/test_functions_stand_alone.py",
)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives one worker the files of COMPUTE from their beginning, and the others the rest, as collected."""

    def _assign_work_unit(self, node: Any) -> None:
        computes = [file for file in COMPUTE if file in self.workqueue]
        waits = [file for file in self.workqueue if file not in COMPUTE]
        is_first = node.gateway.id == COMPUTES
        file = (computes or waits[-1:])[0] if is_first else (waits or computes[-1:])[0]
        self.workqueue.move_to_end(file, last=False)  # of which the base class takes the first
        super()._assign_work_unit(node)
