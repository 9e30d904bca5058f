"""Create the environment of the documentation's site unless it exists: `python tools/docs_env.py [build/docs]`.

tools/docs.lock.txt pins its packages. Prints the path of the interpreter. Exit code 3: the index lacks the packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.environment import ROOT, provide

LOCK = ROOT / "tools" / "docs.lock.txt"


def main(target: str = "build/docs") -> int:
    return provide(target, [LOCK], create)


def create(directory: Path) -> str:
    """Create the environment; return the installer's problem, or ""."""
    print(f"creating {directory} (40 MB, some seconds)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-P", "-m", "venv", "--clear", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--require-hashes", "--requirement", str(LOCK)], stderr=subprocess.PIPE, text=True
    )
    return f"the site's packages cannot be installed: {done.stderr.strip()[-600:]}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
