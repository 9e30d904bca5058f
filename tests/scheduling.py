"""How `make test-all` divides the suite between five workers on two cores.

Training alone keeps one core busy or both; a stack mostly waits. So there are three kinds of workers. One worker takes
the files that compute, in order. Three workers take the long files that wait, the longest first. The last worker takes
the short files, and fills the time in which the others wait. A worker without files of its own kind helps with the
files of the other kinds: first with the long ones, so that the last files are short and all workers end at the same
time. The workers that compute and fill have a low priority: a waiting test gets a core as soon as its event arrives.

A file stays whole, because its tests share fixtures. The first files to compute share trainings (the fixtures
`uninterrupted` and `two_ranks`), and need neither MaxText's nor vLLM's environment: both are installed while the first
tests run (conftest.py). All files that import PyTorch or fork containers are files that compute: each worker would
spend 6 s on the imports.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadfile import LoadFileScheduling

COMPUTES, FILLS = "gw0", "gw4"  # xdist's names of these two workers
# Linux gives a process with niceness 5 a third of the weight of a process with niceness 0, and with 10 a tenth.
NICENESS = {COMPUTES: 5, FILLS: 10}
COMPUTE = (
    "tests/containers/train_trl/test_fsdp.py",
    "tests/containers/train_trl/test_train.py",
    "tests/containers/train_ray/test_train_ray.py",
    "tests/containers/train_maxtext/test_maxtext.py",
    "tests/containers/serve_vllm/test_serve.py",
    "tests/containers/serve_vllm/test_shared.py",
    "tests/emulators/kubernetes/test_ray.py",
    "tests/containers/train_trl/test_same_class.py",
    "tests/cli/test_real_demo.py",
    "tests/cli/test_readme_demos.py",
    "tests/containers/test_seal.py",
    "tests/containers/serve_vllm/test_engine.py",
    "tests/containers/serve_vllm/test_standin.py",
    "tests/containers/common/test_chat.py",
    "tests/containers/common/test_tokenise.py",
    "tests/containers/common/test_rows_in_errors.py",
    "tests/containers/common/test_rows.py",
    "tests/containers/train_trl/test_load.py",
    "tests/containers/train_trl/test_load_now.py",
    "tests/containers/train_trl/test_methods.py",
    "tests/containers/train_trl/test_export.py",
    "tests/containers/train_trl/test_activations.py",
    "tests/containers/train_trl/test_launch.py",
    "tests/containers/train_maxtext/test_maxtext_image.py",
    "tests/containers/train_maxtext/test_maxtext_parts.py",
    "tests/contract/test_functions_stand_alone.py",
    "tests/containers/test_real_images.py",
)
# The files that wait and take half a minute or more, about in the order of their length.
LONG = (
    "tests/stack/test_endpoints.py",
    "tests/stack/test_targets.py",
    "tests/cli/test_demo.py",
    "tests/portable/test_macos.py",
    "tests/stack/test_canary.py",
    "tests/stack/test_rollouts.py",
    "tests/contract/test_calls.py",
    "tests/stack/test_faults.py",
    "tests/stack/test_console.py",
    "tests/stack/test_tpu_vm.py",
    "tests/emulators/tpu/test_startup.py",
    "tests/stack/test_sweep.py",
    "tests/stack/test_endpoints_tpu_vm.py",
    "tests/stack/test_copies.py",
    "tests/stack/test_platform_elsewhere.py",
    "tests/mutants/test_mutants.py",
    "tests/stack/test_same_lives.py",
    "tests/stack/test_crash.py",
    "tests/stack/test_clients.py",
    "tests/emulators/cloudrun/test_restart.py",
    "tests/platforms/tpu_vm/test_train.py",
    "tests/emulators/kubernetes/test_recovery.py",
    "tests/platforms/tpu_vm/test_training_vm.py",
    "tests/containers/serve_vllm/test_compiled.py",
    "tests/stack/test_counts.py",
    "tests/stack/test_every_write.py",
    "tests/stack/test_canaries.py",
    "tests/stack/test_hostile.py",
    "tests/stack/test_waits.py",
    "tests/stack/test_without_gateway.py",
)


class Scheduling(LoadFileScheduling):
    """Gives each worker the files of its own kind first."""

    def _assign_work_unit(self, node: Any) -> None:
        computes = [file for file in COMPUTE if file in self.workqueue]
        waits = [file for file in LONG if file in self.workqueue]
        short = [file for file in self.workqueue if file not in COMPUTE and file not in LONG]
        kinds = {COMPUTES: (computes, waits, short), FILLS: (short, waits, computes)}
        file = next(files[0] for files in kinds.get(node.gateway.id, (waits, short, computes)) if files)
        self.workqueue.move_to_end(file, last=False)  # the base class takes the first file
        super()._assign_work_unit(node)
