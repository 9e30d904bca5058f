"""Keep the code that vLLM compiles when a server of a run starts: the next server of that run gets it from the bucket.

The next start runs this code. So a server reads and writes only below the prefix of its own run
(dropforge/stages/access.py), and may create an archive but never replace it. vLLM's own key has the address of the
model, so vLLM would not use the code that a server of another run compiled.

Compiled code fits one machine at one path. vLLM notes absolute paths (vllm-project/vllm#52154), and its key does not
tell two generations of GPUs apart. So the key has the image, the accelerators (GPUs with their driver, or the type of
the TPU), the instructions of the CPU, the model's config.json, the arguments of the engine, and the path.

On a TPU, XLA's programs are JAX's persistent compilation cache: a file for each program. JAX's own key tells programs,
versions and accelerators apart, so a program of another machine would only be of no use. The directory is on the disk
of the machine: the next container there uses what the container before has compiled, and downloads nothing.

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
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from dropforge.base import names
from dropforge.base.log import log
from dropforge.cloud.clients import Clients
from dropforge.cloud.run_access import HOST_VARIABLE
from dropforge.run.starts import write_start

from .children import die_with_parent

# A directory below the temporary directory, or an absolute path. Without it nothing is kept.
VARIABLE = "DROPFORGE_COMPILE_CACHE"
IMAGE_VARIABLE = "DROPFORGE_IMAGE"  # the reference of the container's image
_SECONDS = 30.0  # without a byte from Cloud Storage
_LOOK_SECONDS = 1.0
_BLOCK_BYTES = 1 << 20
# A driver's program is on the PATH on Cloud Run; on GKE it is where the device plugin mounts it.
_NVIDIA_SMI = ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
_COMPILERS = ("vllm", "torch-", "triton", "jax-", "jaxlib-", "libtpu-", "tpu_inference-")
# Every TPU VM has this attribute: Ray reads the type of the TPU there, too
# (https://github.com/ray-project/ray/blob/master/python/ray/_private/accelerators/tpu.py, 2026-11-27).
_TPU_TYPE = "/computeMetadata/v1/instance/attributes/accelerator-type"
_MOST_TYPE_BYTES = 100


class Unfit(Exception):
    """What is to be kept, or was kept, breaks a limit."""


@dataclass(frozen=True)
class Kind:
    """A kind of compiled code: where an engine writes it, and the limits of its archive."""

    name: str
    places: tuple[str, ...]  # directories of compiled code; others have the model's files, or figures of one machine
    most_bytes: int  # of the files
    most_archive_bytes: int
    most_files: int
    compression: int  # a constant of zipfile
    stays: bool  # on a disk that outlives the container


# On Cloud Run, the files are in the memory of the instance.
CODE = Kind(
    name="code",
    places=("vllm/torch_compile_cache", "vllm/modelinfos", "inductor", "triton"),
    most_bytes=1 << 30,
    most_archive_bytes=512 << 20,
    most_files=50_000,
    compression=zipfile.ZIP_DEFLATED,
    stays=False,
)
# JAX compresses each program itself. A user of vLLM on TPUs reports 4 GB for a context of 22,528 tokens, which take a
# minute from a bucket and 55 minutes to compile (github.com/SachinKonan/SkyRLTpu, tpu/start_vllm_tpu.sh, 2026-11-27).
# While an archive is read or written, the boot disk of 100 GB has the programs twice, beside the image and the weights.
PROGRAMS = Kind(
    name="programs",
    places=("xla",),
    most_bytes=6 << 30,
    most_archive_bytes=(6 << 30) + (64 << 20),  # with the names of the files
    most_files=50_000,
    compression=zipfile.ZIP_STORED,
    stays=True,
)
_KINDS = {kind.name: kind for kind in (CODE, PROGRAMS)}


@dataclass(frozen=True)
class Kept:
    """An archive in the runs bucket, and the directory on the machine that it stands for."""

    bucket: str
    name: str
    directory: Path
    kind: Kind = CODE


def environment(directory: Path) -> dict[str, str]:
    """The variables by which vLLM on a GPU or a CPU, PyTorch and Triton write below the directory.

    vLLM sets the last two itself when it compiles a model; kernels that it compiles before follow these.
    """
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }


def tpu_environment(directory: Path) -> dict[str, str]:
    """The variable by which vLLM on a TPU has XLA's programs below the directory."""
    return {"VLLM_XLA_CACHE_PATH": str(directory / "xla")}


def kept(
    kind: Kind,
    bucket: str,
    run: str,
    directory: Path,
    python: str | None,
    arguments: list[str],
    config: Mapping[str, Any],
) -> Kept:
    """The archive for a server of the run on this machine. Raises Unfit if the machine does not tell what it is."""
    parts = {
        "image": os.environ.get(IMAGE_VARIABLE, ""),
        "versions": versions(python),
        "accelerators": [tpu()] if kind is PROGRAMS else gpus(),
        "cpu": cpu(),
        "config": config,
        "arguments": arguments,
        "directory": str(directory),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Kept(bucket, names.cache_object(run, key), directory, kind)


def versions(python: str | None) -> list[str]:
    """The names and versions of the packages that compile, in the environment of vLLM's interpreter."""
    if python is None:
        return []
    found = Path(python).parent.parent.glob("lib/python*/*-packages/*.dist-info")
    return sorted(path.stem for path in found if path.name.startswith(_COMPILERS))


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


def tpu() -> str:
    """The type of the TPU, as v5litepod-8: generation and chips. Raises Unfit if the metadata server does not tell."""
    host = os.environ.get(HOST_VARIABLE, "metadata.google.internal")
    request = Request(f"http://{host}{_TPU_TYPE}", headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=_SECONDS) as response:
            found = response.read(_MOST_TYPE_BYTES).decode().strip()
    except (OSError, HTTPException, ValueError) as error:
        raise Unfit(f"the metadata server does not tell the type of the TPU: {type(error).__name__}") from None
    if not found:
        raise Unfit("the metadata server has an empty type of the TPU")
    return str(found)


def cpu() -> str:
    """The instructions of the CPU: a program that was compiled for more of them would be killed (SIGILL)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise Unfit("there is no /proc/cpuinfo, so the CPU is unknown") from None
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(flags.split()))


def fetch(client: Any, kept: Kept) -> bool:
    """Put the files of the archive into the directory; whether they are there. What was there before is deleted.

    On a disk that outlives the container, what this machine has compiled stays, and takes the place of the archive.
    The directory gets either all files of the archive or none: a container may be killed at any time.
    """
    from google.api_core.exceptions import NotFound

    if kept.kind.stays and any(_files(kept.directory, kept.kind)):
        log("uses the compiled code on the disk of this machine", stage="serve", object=kept.name)
        return False
    part = kept.directory.with_name(f"{kept.directory.name}.part")
    try:
        _clear(kept.directory)
        _clear(part)
        size = _download(client, kept, part)
        part.rename(kept.directory)
    except NotFound:
        return False
    except Exception as error:  # noqa: BLE001  (whatever it is, the engine compiles)
        _tell("the compiled code of an earlier start is not used", kept, error)
        return False
    finally:
        shutil.rmtree(part, ignore_errors=True)
    log("got the compiled code of an earlier start", stage="serve", object=kept.name, bytes=size)
    return True


def _download(client: Any, kept: Kept, directory: Path) -> int:
    """Unpack the archive into an empty directory; the bytes of the archive. Raises Unfit, and errors of the client."""
    most = kept.kind.most_archive_bytes
    with tempfile.TemporaryFile(dir=directory.parent) as file:
        blob = client.bucket(kept.bucket).blob(kept.name)
        # One byte more than an archive may have shows that it has too many.
        blob.download_to_file(file, end=most, raw_download=True, timeout=_SECONDS)
        if file.tell() > most:
            raise Unfit(f"it has more than {most} bytes")
        unpack(file, directory, kept.kind)
        return file.seek(0, os.SEEK_END)


def keep(client: Any, kept: Kept) -> bool:
    """Create the archive; whether this server has created it. An archive is never replaced."""
    from google.api_core.exceptions import Forbidden, PreconditionFailed

    blob = client.bucket(kept.bucket).blob(kept.name)
    try:
        if blob.exists(timeout=_SECONDS):
            return False
        if kept.kind.stays:
            _check_disk(kept)
        with tempfile.TemporaryFile(dir=kept.directory.parent) as file:
            if not pack(kept.directory, file, kept.kind):
                return False
            size = file.tell()
            if size > kept.kind.most_archive_bytes:
                raise Unfit(f"the archive would have {size} bytes; expected {kept.kind.most_archive_bytes} at most")
            try:
                blob.upload_from_file(file, rewind=True, size=size, if_generation_match=0, timeout=_SECONDS)
            except (Forbidden, PreconditionFailed):  # nobody may replace an archive
                if blob.exists(timeout=_SECONDS):
                    return False  # another instance was first
                raise
    except Exception as error:  # noqa: BLE001  (whatever it is, the next start compiles again)
        _tell("the compiled code is not kept", kept, error)
        return False
    log("kept the compiled code", stage="serve", object=kept.name, bytes=size)
    return True


def _check_disk(kept: Kept) -> None:
    """Raise Unfit if an archive would take more than half of what is free on the disk of a server that answers."""
    free = shutil.disk_usage(kept.directory).free
    if 2 * sum(path.stat().st_size for path in _files(kept.directory, kept.kind)) > free:
        raise Unfit(f"the disk of this machine has only {free} free bytes")


def pack(directory: Path, file: Any, kind: Kind) -> int:
    """Write the files that are kept, and no links, as a zip archive; their number. Raises Unfit."""
    left, count = kind.most_bytes, 0
    with zipfile.ZipFile(file, "w", kind.compression, compresslevel=1) as archive:
        for path in _files(directory, kind):
            left, count = left - path.stat().st_size, count + 1
            if left < 0 or count > kind.most_files:
                raise Unfit(f"it has more than {kind.most_bytes} bytes or {kind.most_files} files")
            archive.write(path, path.relative_to(directory).as_posix())
    return count


def unpack(file: Any, directory: Path, kind: Kind) -> None:
    """Write the files of a zip archive into an empty directory.

    Every entry becomes a plain file below one of `kind.places`: a link of the archive is only a file with a path as its
    content. Raises Unfit for another place, and for more bytes than an archive may have, whatever sizes it claims.
    """
    left = kind.most_bytes
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > kind.most_files:
            raise Unfit(f"it has {len(entries)} files; expected {kind.most_files} at most")
        for entry in entries:
            path = directory / _place(entry.filename, kind)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("xb") as target:
                while block := source.read(_BLOCK_BYTES):
                    left -= len(block)
                    if left < 0:
                        raise Unfit(f"it has more than {kind.most_bytes} bytes")
                    target.write(block)


def _place(name: str, kind: Kind) -> PurePosixPath:
    path = PurePosixPath(name)
    is_below = any(str(parent) in kind.places for parent in path.parents)
    if ".." in path.parts or not is_below:
        raise Unfit(f"it has a file at {name!r:.200}; expected a path below {', '.join(kind.places)}")
    return path


def _files(directory: Path, kind: Kind) -> Iterator[Path]:
    for place in kind.places:
        for root, _, names_ in os.walk(directory / place):
            paths = (Path(root, name) for name in sorted(names_))
            yield from (path for path in paths if path.is_file() and not path.is_symlink())


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


def watch(start: Start, address: str, bucket: str, run: str, kept: Kept | None, environment: Mapping[str, str]) -> None:
    """Start a process that tells when vLLM answers at HOST:PORT, and then keeps what it has compiled; None: nothing.

    The calling process becomes vLLM. The process ends with it.
    """
    what = (kept.kind.name, kept.name, str(kept.directory)) if kept else ()
    command = [sys.executable, "-m", "containers.serve_vllm.compiled", start.to_json(), address, bucket, run, *what]
    subprocess.Popen(command, env=dict(environment), preexec_fn=die_with_parent())


def main() -> None:
    """Wait until vLLM answers: it has compiled everything by then."""
    text, address, bucket, run, *what = sys.argv[1:]
    os.nice(10)  # requests come first
    while not _is_healthy(address):
        time.sleep(_LOOK_SECONDS)
    client = Clients(dict(os.environ)).storage()
    Start.from_json(text).ready(client, bucket, run)
    if what:
        kind, name, directory = what
        keep(client, Kept(bucket, name, Path(directory), _KINDS[kind]))


def _is_healthy(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/health", timeout=_SECONDS) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    main()
