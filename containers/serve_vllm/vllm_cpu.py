"""Start the server of vLLM's CPU build with one import of vLLM: `python -P vllm_cpu.py FLAGS`, in vLLM's environment.

An import of vLLM takes 7 s of processor time. vLLM's own command imports it four times: in the server, in a process
that reads the class of the model, in the engine, and in the engine's worker. The reasons are CUDA, which a forked
process cannot use, and OpenMP, which binds threads to cores when a process starts. Here the server reads the class
itself. It forks the engine, which is its own worker, and no thread is bound to a core.

A forked process waits for ever for OpenMP's threads of its parent. So the server has none: it computes with one thread.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` needs package metadata that the CPU build lacks


def main() -> None:
    """Become the server, with the arguments of this process."""
    from vllm.model_executor.models import registry  # type: ignore[import-not-found]
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    registry._run_in_subprocess = here
    CpuPlatform.check_and_update_config = staticmethod(forking(CpuPlatform.check_and_update_config))
    compute_with_one_thread()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def forking(configure: Callable[[Any], None]) -> Callable[[Any], None]:
    """vLLM's configuration for a CPU, but for its choice of further processes."""

    def configure_to_fork(config: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is its own worker
        configure(config)
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}

    return configure_to_fork


def here(work: Callable[[], Any]) -> Any:
    """Do the work in this process."""
    return work()


def compute_with_one_thread() -> None:
    """Compute with one thread in this process, and in the processes that it forks with the others.

    vLLM's own command leaves a core to the server, too: OpenMP's threads spin while one of them waits for a core.
    """
    import torch

    others = max(1, torch.get_num_threads() - 1)
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(others))


if __name__ == "__main__":
    main()
