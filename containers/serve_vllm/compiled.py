"""Keep the code that vLLM compiles when a server of a run starts: the next server of that run gets it from the bucket.

The next start runs this code. So a server reads and writes only below the prefix of its own run
(dropforge/stages/access.py), and may create an archive but never replace it. vLLM's own key has the address of the
model, so vLLM would not use the code that a server of another run compiled.

Compiled code fits one machine at one path. vLLM notes absolute paths (vllm-project/vllm#52154), and its key does not
tell two generations of GPUs apart. So the key has the image, the GPUs with their driver, the instructions of the CPU,
the model's config.json, the arguments of the engine, and the path.

Nothing here stops a start: without an archive, the engine compiles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from dropforge.base import names
from dropforge.base.log import log
from dropforge.cloud.clients import Clients
from dropforge.run.starts import write_start

from .children import die_with_parent

# A directory below the temporary directory, or an absolute path. Without it nothing is kept.
VARIABLE = "DROPFORGE_COMPILE_CACHE"
IMAGE_VARIABLE = "DROPFORGE_IMAGE"  # the reference of the container's image
# Directories below the cache that hold compiled code. Others hold the model's files, or figures of this one machine.
KEPT = ("vllm/torch_compile_cache", "vllm/modelinfos", "inductor", "triton")
MOST_BYTES = 1 << 30  # of the files; on Cloud Run they are in the memory of the instance
MOST_ARCHIVE_BYTES = 512 << 20
MOST_FILES = 50_000
_SECONDS = 30.0  # without a byte from Cloud Storage
_TOTAL_SECONDS = 60.0  # of all tries of a request
_LOOK_SECONDS = 1.0
_BLOCK_BYTES = 1 << 20
# A driver's program is on the PATH on Cloud Run; on GKE it is where the device plugin mounts it.
_NVIDIA_SMI = ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")


class Unfit(Exception):
    """What is to be kept, or was kept, breaks a limit."""


@dataclass(frozen=True)
class Kept:
    """An archive in the runs bucket, and the directory on the machine that it stands for."""

    bucket: str
    name: str
    directory: Path


def environment(directory: Path) -> dict[str, str]:
    """The variables by which vLLM, PyTorch and Triton write below the directory.

    vLLM sets the last two itself when it compiles a model; kernels that it compiles before follow these.
    """
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }


def kept(
    bucket: str, run: str, directory: Path, python: str | None, arguments: list[str], config: Mapping[str, Any]
) -> Kept:
    """The archive for a server of the run on this machine. Raises Unfit if the machine does not tell what it is."""
    parts = {
        "image": os.environ.get(IMAGE_VARIABLE, ""),
        "versions": versions(python),
        "gpus": gpus(),
        "cpu": cpu(),
        "config": config,
        "arguments": arguments,
        "directory": str(directory),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Kept(bucket, names.cache_object(run, key), directory)


def versions(python: str | None) -> list[str]:
    """The names and versions of the packages that compile, in the environment of vLLM's interpreter."""
    if python is None:
        return []
    found = Path(python).parent.parent.glob("lib/python*/*-packages/*.dist-info")
    return sorted(path.stem for path in found if path.name.startswith(("vllm", "torch-", "triton")))


def gpus() -> list[str]:
    """Name, compute capability and driver of each GPU; [] without a GPU. Raises Unfit if the driver does not tell."""
    if not Path("/dev/nvidiactl").exists():
        return []
    query = ["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    program = next(filter(None, map(shutil.which, _NVIDIA_SMI)), None)
    if program is None:
        raise Unfit("there is no nvidia-smi, so the GPU is unknown")
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unfit(f"nvidia-smi does not tell the GPU: {type(error).__name__}") from None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def cpu() -> str:
    """The instructions of the CPU: a program that was compiled for more of them would be killed (SIGILL)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise Unfit("there is no /proc/cpuinfo, so the CPU is unknown") from None
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(flags.split()))


def fetch(client: Any, kept: Kept) -> bool:
    """Put the files of the archive into the directory, which is empty before; whether there is an archive."""
    from google.api_core.exceptions import NotFound

    shutil.rmtree(kept.directory, ignore_errors=True)
    kept.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=kept.directory.parent) as file:
            blob = client.bucket(kept.bucket).blob(kept.name)
            # One byte more than an archive may have shows that it has too many.
            blob.download_to_file(file, end=MOST_ARCHIVE_BYTES, raw_download=True, **_patience())
            if file.tell() > MOST_ARCHIVE_BYTES:
                raise Unfit(f"it has more than {MOST_ARCHIVE_BYTES} bytes")
            unpack(file, kept.directory)
            size = file.seek(0, os.SEEK_END)
    except NotFound:
        return False
    except Exception as error:  # noqa: BLE001  (whatever it is, the engine compiles)
        _clear(kept.directory)
        _tell("the compiled code of an earlier start is not used", kept, error)
        return False
    log("got the compiled code of an earlier start", stage="serve", object=kept.name, bytes=size)
    return True


def keep(client: Any, kept: Kept) -> bool:
    """Create the archive; whether this server has created it. An archive is never replaced."""
    from google.api_core.exceptions import Forbidden, PreconditionFailed

    blob = client.bucket(kept.bucket).blob(kept.name)
    try:
        with tempfile.TemporaryFile(dir=kept.directory.parent) as file:
            if not pack(kept.directory, file):
                return False
            size = file.tell()
            if size > MOST_ARCHIVE_BYTES:
                raise Unfit(f"the archive would have {size} bytes; expected {MOST_ARCHIVE_BYTES} at most")
            try:
                blob.upload_from_file(file, rewind=True, size=size, if_generation_match=0, **_patience())
            except (Forbidden, PreconditionFailed):  # nobody may replace an archive
                if blob.exists(**_patience()):
                    return False  # another instance was first
                raise
    except Exception as error:  # noqa: BLE001  (whatever it is, the next start compiles again)
        _tell("the compiled code is not kept", kept, error)
        return False
    log("kept the compiled code", stage="serve", object=kept.name, bytes=size)
    return True


def pack(directory: Path, file: Any) -> int:
    """Write the files that are kept, and no links, as a zip archive; their number. Raises Unfit."""
    left, count = MOST_BYTES, 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in _files(directory):
            left, count = left - path.stat().st_size, count + 1
            if left < 0 or count > MOST_FILES:
                raise Unfit(f"it has more than {MOST_BYTES} bytes or {MOST_FILES} files")
            archive.write(path, path.relative_to(directory).as_posix())
    return count


def unpack(file: Any, directory: Path) -> None:
    """Write the files of a zip archive into an empty directory.

    Every entry becomes a plain file below KEPT: a link of the archive is only a file with a path as its content.
    Raises Unfit for another place, and for more bytes than an archive may have, whatever sizes it claims.
    """
    left = MOST_BYTES
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_FILES:
            raise Unfit(f"it has {len(entries)} files; expected {MOST_FILES} at most")
        for entry in entries:
            path = directory / _place(entry.filename)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("xb") as target:
                while block := source.read(_BLOCK_BYTES):
                    left -= len(block)
                    if left < 0:
                        raise Unfit(f"it has more than {MOST_BYTES} bytes")
                    target.write(block)


def _place(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if ".." in path.parts or not any(path.is_relative_to(kept) and path != PurePosixPath(kept) for kept in KEPT):
        raise Unfit(f"it has a file at {name!r:.200}; expected a path below {', '.join(KEPT)}")
    return path


def _files(directory: Path) -> Iterator[Path]:
    for each in KEPT:
        for root, _, names_ in os.walk(directory / each):
            paths = (Path(root, name) for name in sorted(names_))
            yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _patience() -> dict[str, Any]:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _SECONDS, "retry": DEFAULT_RETRY.with_timeout(_TOTAL_SECONDS)}


def _clear(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _tell(message: str, kept: Kept, error: Exception) -> None:
    text = f"{message}: {type(error).__name__}: {error}"
    log(text, stage="serve", severity="WARNING", object=kept.name)


class Start:
    """The parts of a start, in seconds; dropforge/run/starts.py has their names.

    `began` is of time.monotonic, which all processes of a machine share.
    """

    def __init__(self, began: float) -> None:
        self.began, self._last = began, time.monotonic()
        self.seconds = {"program": round(self._last - began, 2)}

    def done(self, part: str) -> None:
        """The part has ended; it began when the one before ended."""
        now = time.monotonic()
        self.seconds[part] = round(now - self._last, 2)
        self._last = now

    def ready(self, client: Any, bucket: str, run: str) -> None:
        """The engine answers: tell each part, in the log and to the record."""
        self.done("engine")
        log("ready", stage="serve", run=run, seconds=round(time.monotonic() - self.began, 2), parts=self.seconds)
        try:
            write_start(client, bucket, run, self.seconds)
        except Exception as error:  # noqa: BLE001  (figures stop no server)
            text = f"the parts of the start are not in the record: {type(error).__name__}: {error}"
            log(text, stage="serve", run=run, severity="WARNING")

    def to_json(self) -> str:
        return json.dumps({"began": self.began, "last": self._last, "seconds": self.seconds})

    @classmethod
    def from_json(cls, text: str) -> Start:
        fields = json.loads(text)
        start = cls(fields["began"])
        start._last, start.seconds = fields["last"], fields["seconds"]
        return start


def watch(start: Start, port: int, bucket: str, run: str, kept: Kept | None, environment: Mapping[str, str]) -> None:
    """Start a process that tells when vLLM answers, and then keeps what it has compiled; None: nothing.

    The calling process becomes vLLM. The process ends with it.
    """
    what = (kept.name, str(kept.directory)) if kept else ()
    command = [sys.executable, "-m", "containers.serve_vllm.compiled", start.to_json(), str(port), bucket, run, *what]
    subprocess.Popen(command, env=dict(environment), preexec_fn=die_with_parent())


def main() -> None:
    """Wait until vLLM answers: it has compiled everything by then."""
    text, port, bucket, run, *what = sys.argv[1:]
    os.nice(10)  # requests come first
    while not _is_healthy(port):
        time.sleep(_LOOK_SECONDS)
    client = Clients(dict(os.environ)).storage()
    Start.from_json(text).ready(client, bucket, run)
    if what:
        name, directory = what
        keep(client, Kept(bucket, name, Path(directory)))


def _is_healthy(port: str) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=_SECONDS) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    main()
