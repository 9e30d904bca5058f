"""Create the environment of the documentation's site unless it exists: `python tools/docs_env.py [build/docs]`.

tools/docs.lock.txt pins its packages. Prints the path of the interpreter. Exit code 3: the index lacks the packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import uv
from tools.environment import ROOT, provide

LOCK = ROOT / "tools" / "docs.lock.txt"


def main(target: str = "build/docs") -> int:
    return provide(target, [LOCK], create)


def create(directory: Path) -> str:
    """Create the environment; return the installer's problem, or ""."""
    print(f"creating {directory} (40 MB, some seconds)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-P", "-m", "venv", "--clear", "--without-pip", str(directory)], check=True)
    try:
        uv.install(directory / "bin" / "python", LOCK)  # it prints its problem
    except subprocess.CalledProcessError as error:
        return f"the site's packages cannot be installed: uv ended with {error.returncode}"
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
