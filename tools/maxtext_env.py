"""Create MaxText's own environment unless it exists: `python tools/maxtext_env.py [build/maxtext]`.

MaxText needs Python 3.12 and other versions than lock.txt pins. containers/train_maxtext/requirements.lock.txt pins all
packages of the environment. PyTorch is not among them: code that needs PyTorch runs in build/venv. uv installs them
(tools/uv.py).
Prints the path of the interpreter. Exit code 3: this machine has no Python 3.12.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import uv
from tools.environment import ROOT, provide

LOCK = ROOT / "containers" / "train_maxtext" / "requirements.lock.txt"


def main(target: str = "build/maxtext") -> int:
    return provide(target, [LOCK], create)


def create(directory: Path) -> str:
    python = find_python()
    if python is None:
        return "MaxText needs Python 3.12: no python3.12 in PATH, nor in pyenv's versions"
    size = "about 600 MB, one to five minutes"
    print(f"creating {directory} from {LOCK.relative_to(ROOT)} ({size})", file=sys.stderr, flush=True)
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", str(directory)], check=True)
    uv.install(directory / "bin" / "python", LOCK)
    return ""


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
    sys.exit(main(*sys.argv[1:]))
