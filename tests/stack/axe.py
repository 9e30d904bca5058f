"""axe-core, which finds what keeps people with a screen reader or weak eyes from a page. Tests alone download it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "axe-core@4.14.1"  # MPL-2.0
INTEGRITY = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r7"
    "6ASyFNNtuFooJpZe37OgudVGtQ=="
)  # sha512, as the npm registry publishes it
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
RUN = f"async () => (await axe.run({{runOnly: {RULES}}})).violations.map(v => [v.id, v.nodes.map(n => n.target)])"
DOWNLOAD_SECONDS = 120


def script() -> str:
    """Return axe-core's source; skip the test where npm cannot download it."""
    archive = ROOT / "build" / "axe" / "axe-core.tgz"
    if not archive.exists():
        _download(archive)
    digest = b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == INTEGRITY, f"{archive} is not {PACKAGE}; delete it"
    with tarfile.open(archive) as files:
        source = files.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


def _download(archive: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm, which downloads axe-core")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=archive.parent) as directory:
        try:
            subprocess.run(
                [npm, "pack", PACKAGE], cwd=directory, capture_output=True, check=True, timeout=DOWNLOAD_SECONDS
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm cannot download axe-core: {error}")
        next(Path(directory).glob("*.tgz")).rename(archive)  # whole, also with other tests beside
