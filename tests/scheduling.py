"""How `make test` divides the suite between three workers on two cores.

Training alone keeps both cores busy; a stack mostly waits. So a single worker takes the files that compute, and the two
other workers take the files that wait. A worker without files of its own kind takes files of the other kind, from their
end. The computing worker has a low priority: a waiting test gets a core as soon as its event arrives. A file stays
whole, because its tests share fixtures, and the files that compute share session fixtures. Files that need MaxText's or
vLLM's environment are not the first to compute: both are installed while the first tests run (conftest.py).
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadfile import LoadFileScheduling

COMPUTES = "gw0"  # xdist's name of the worker that computes
NICENESS = 5  # Linux gives the process a third of the weight of a process with niceness 0
COMPUTE = (
    "tests/containers/train_trl/test_fsdp.py",
    "tests/containers/train_trl/test_train.py",
    "tests/containers/train_trl/test_same_class.py",
    "tests/containers/train_ray/test_train_ray.py",
    "tests/containers/train_maxtext/test_maxtext.py",
    "tests/cli/test_real_demo.py",
    "tests/emulators/kubernetes/test_ray.py",
    "tests/containers/serve_vllm/test_serve.py",
    "tests/containers/common/test_chat.py",
    "tests/containers/common/test_tokenise.py",
    "tests/containers/common/test_rows_in_errors.py",
    "tests/containers/serve_vllm/test_engine.py",
    "tests/containers/train_trl/test_export.py",
    "tests/containers/test_seal.py",
    "tests/containers/train_trl/test_activations.py",
    "tests/containers/train_trl/test_launch.py",
    "tests/containers/train_maxtext/test_maxtext_image.py",
    "tests/containers/train_maxtext/test_maxtext_parts.py",
    "tests/contract/test_functions_stand_alone.py",
    "tests/containers/test_real_images.py",
)


class Scheduling(LoadFileScheduling):
    """Gives the worker COMPUTES the files of COMPUTE in order, and the other workers the other files as collected."""

    def _assign_work_unit(self, node: Any) -> None:
        computes = [file for file in COMPUTE if file in self.workqueue]
        waits = [file for file in self.workqueue if file not in COMPUTE]
        is_first = node.gateway.id == COMPUTES
        file = (computes or waits[-1:])[0] if is_first else (waits or computes[-1:])[0]
        self.workqueue.move_to_end(file, last=False)  # the base class takes the first file
        super()._assign_work_unit(node)
