"""Install a lock into a virtual environment with uv, in a fraction of pip's time.

uv itself comes from containers/uv.lock.txt by pip, into build/uv. build/uv-cache keeps what uv downloaded.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "containers" / "uv.lock.txt"
HOME = ROOT / "build" / "uv"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def install(python: Path, lock: Path) -> None:
    """Install all packages of a complete lock with hashes. Raises subprocess.CalledProcessError."""
    options = ["--quiet", "--no-deps", "--require-hashes", "--no-build-isolation", "--requirement", str(lock)]
    # setuptools, which builds the packages without wheels, is beside uv.
    environment = {**os.environ, **settings(), "PYTHONPATH": str(HOME)}
    subprocess.run([program(), "pip", "install", "--python", str(python), *options], env=environment, check=True)


def program(python: str = sys.executable) -> str:
    """Return uv, installed if it is not there by the pip of `python`."""
    HOME.parent.mkdir(exist_ok=True)
    with Path(f"{HOME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may need it at once
        stamp = HOME / "installed"
        if not stamp.exists() or stamp.read_text() != LOCK.read_text():
            pip = [python, "-P", "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
            pip += ["--require-hashes", "--upgrade", "--target", str(HOME), "--requirement", str(LOCK)]
            subprocess.run(pip, check=True)
            stamp.write_text(LOCK.read_text())
    return str(HOME / "bin" / "uv")


def settings(python: str = sys.executable) -> dict[str, str]:
    """Return uv's variables: it takes the index of `python`'s pip, and none of pip's further places, whose files may
    differ from the files that a lock names."""
    own = {"UV_CACHE_DIR": str(ROOT / "build" / "uv-cache"), "UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "1"}
    index = pip_setting("index-url", python)
    return {**own, "UV_DEFAULT_INDEX": index} if index else own


def torch_places(python: str = sys.executable) -> dict[str, str]:
    """Return uv's variables for PyTorch for CPUs: it is on PyTorch's own index, or in a folder that pip is told of."""
    folder = pip_setting("find-links", python)
    torch = {"UV_FIND_LINKS": folder} if folder else {"UV_INDEX": TORCH_INDEX}
    return {**settings(python), **torch, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def pip_setting(name: str, python: str = sys.executable) -> str:
    """Return pip's setting from its variable, or from its configuration; "" without one."""
    if given := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return given
    command = [python, "-P", "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
