"""Create MaxText's own environment unless it exists: `python tools/maxtext_env.py [build/maxtext]`.

MaxText needs Python 3.12 and other versions than lock.txt pins. containers/train_maxtext/requirements.lock.txt pins all
packages of the environment. PyTorch is not among them: code that needs PyTorch runs in build/venv. uv installs them
(tools/uv.py).
Prints the path of the interpreter. Exit code 3: this machine has no Python 3.12.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "containers" / "train_maxtext" / "requirements.lock.txt"
NO_PYTHON = 3


def main(target: str = "build/maxtext") -> int:
    directory = ROOT / target
    directory.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes start this script at once
        if not is_installed(directory):
            python = find_python()
            if python is None:
                print("MaxText needs Python 3.12: no python3.12 in PATH, nor in pyenv's versions", file=sys.stderr)
                return NO_PYTHON
            install(python, directory)
    print(directory / "bin" / "python")
    return 0


def is_installed(directory: Path) -> bool:
    """Return whether the environment is complete and matches the current lock file."""
    stamp = directory / ".installed"
    return stamp.exists() and stamp.read_text() == digest()


def install(python: str, directory: Path) -> None:
    print(
        f"creating {directory} from {LOCK.relative_to(ROOT)} (about 600 MB, half a minute)", file=sys.stderr, flush=True
    )
    from tools import uv

    began = time.monotonic()
    subprocess.run([python, "-m", "venv", "--clear", str(directory)], check=True)
    uv.install(directory / "bin" / "python", LOCK)
    (directory / ".installed").write_text(digest())
    print(f"created in {time.monotonic() - began:.0f} s", file=sys.stderr)


def digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def find_python() -> str | None:
    """Return a Python 3.12 that runs (pyenv's python3.12 in PATH may fail)."""
    for candidate in candidates():
        check = [candidate, "-c", "import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))"]
        try:
            if subprocess.run(check, capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def candidates() -> Iterator[str]:
    yield sys.executable
    yield "python3.12"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(map(str, pyenv.glob("versions/3.12*/bin/python3.12")), reverse=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(*sys.argv[1:]))
