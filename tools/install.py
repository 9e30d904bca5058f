"""Create the virtual environment that every make target uses: `python tools/install.py build/venv`.

lock.txt pins the versions. The script installs the CPU build of PyTorch if the configured index has it. Otherwise it
installs the plain build, which downloads gigabytes of CUDA on Linux.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "local,console,train,serve-cpu,dev"


def main(target: str) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  (nothing has checked the interpreter before)
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"dropforge needs Python 3.11 or newer; {sys.executable} is {version}", file=sys.stderr)
        return 1
    directory = ROOT / target
    if not (directory / "bin" / "python").exists():
        print(f"creating {target} with Python {sys.version.split()[0]}", flush=True)
        venv.create(directory, with_pip=True, clear=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    # Most of the 20,000 modules are never imported; the first import compiles a module.
    pip += ["--quiet", "--no-compile", "--constraint", str(ROOT / "lock.txt")]
    torch = locked("torch")
    print(f"installing PyTorch {torch} (CPU build if available)", flush=True)
    if subprocess.run([*pip, f"torch=={torch}+cpu"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, f"torch=={torch}"], check=True)
    print("installing dropforge and its dependencies, as pinned in lock.txt", flush=True)
    return subprocess.run([*pip, "--editable", f"{ROOT}[{EXTRAS}]"]).returncode


def locked(name: str) -> str:
    """Return the version of `name` in lock.txt."""
    for line in (ROOT / "lock.txt").read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.split("==")[1].strip()
    raise SystemExit(f"lock.txt does not pin {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "build/venv"))
