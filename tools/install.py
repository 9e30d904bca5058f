"""Create the virtual environment that every make target uses: `python tools/install.py build/venv`.

lock.txt pins the versions. uv (tools/uv.py) installs them. PyTorch is the build for CPUs where
PyTorch's index has one. Otherwise it is the plain build, which downloads gigabytes of CUDA on Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "local,train,serve-cpu,dev"

sys.path.insert(0, str(ROOT))

from tools import uv  # noqa: E402  (the script runs before the package is installed)


def main(target: str) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  (nothing has checked the interpreter before)
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"dropforge needs Python 3.11 or newer; {sys.executable} is {version}", file=sys.stderr)
        print("hint: name another: make PYTHON=/path/to/python3.12 setup", file=sys.stderr)
        return 1
    directory = ROOT / target
    python = str(directory / "bin" / "python")
    if not Path(python).exists():
        print(f"creating {target} with Python {sys.version.split()[0]}", flush=True)
        venv.create(directory, with_pip=True, clear=True)
    torch = locked("torch")
    print(f"installing PyTorch {torch} (CPU build if available)", flush=True)
    install(python, uv.torch_places(python), "--no-deps", f"torch=={torch}+cpu", stderr=subprocess.DEVNULL)
    print("installing dropforge and its dependencies, as pinned in lock.txt", flush=True)  # with the plain PyTorch, too
    if code := install(python, uv.settings(python), "--editable", f"{ROOT}[{EXTRAS}]"):
        return code
    print(f'done; in a shell, the command is there after: export PATH="$PWD/{target}/bin:$PATH"')
    return 0


def install(python: str, places: Mapping[str, str], *words: str, stderr: int | None = None) -> int:
    """Let uv install packages in the versions of lock.txt; return its exit code.

    uv compiles no module: most of the 20,000 modules are never imported, and the first import compiles a module.
    """
    command = [uv.program(python), "pip", "install", "--quiet", "--python", python]
    command += ["--constraint", str(ROOT / "lock.txt"), *words]
    return subprocess.run(command, env={**os.environ, **places}, stderr=stderr).returncode


def locked(name: str) -> str:
    """Return the version of `name` in lock.txt."""
    for line in (ROOT / "lock.txt").read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.split("==")[1].strip()
    raise SystemExit(f"lock.txt does not pin {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "build/venv"))
