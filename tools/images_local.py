"""Build the images of containers/ for real, without Docker and without a registry, and start each entry point in them.

    make images-local                            every image
    python tools/images_local.py train_ray       some; `--keep` keeps them

buildah builds from the Dockerfiles themselves. What cannot be fetched without a registry has a stand-in, given by
build arguments: a Debian 12 root with this machine's CPython 3.12 for python:3.12-slim-bookworm; the same root with a
`vllm` that prints its command for vLLM's image; PyTorch for CPUs for the build with CUDA. So this shows neither CUDA
nor that a base exists. build/images-local keeps downloads, and the facts of each image (ROLE.json), which
tests/containers/test_real_images.py compares with the local stack's reading of the Dockerfile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "images-local"
FREE_BYTES = 12 * 2**30  # the driver vfs copies every file at each step
# The packages of python:3.12-slim-bookworm beside Debian's minimal root and Python itself. python3 is Debian's 3.11.
PACKAGES = (
    *("ca-certificates", "python3", "libssl3", "libffi8", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libreadline8"),
    *("zlib1g", "libexpat1", "libuuid1", "libncursesw6", "netbase", "tzdata"),
)
START_SECONDS = 900  # for one command in a container
ROOT_TAR = f"root-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:8]}.tar"
PYTHON_IMAGE = f"""FROM scratch
ADD {ROOT_TAR} /
ADD python.tar /usr/local/
RUN ldconfig
"""
VLLM_IMAGE = """FROM localhost/python
RUN printf '#!/usr/local/bin/python3\\nimport sys\\nprint("vllm of", sys.prefix, *sys.argv[1:])\\n' \\
        >/usr/local/bin/vllm \\
 && chmod +x /usr/local/bin/vllm \\
 && site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \\
 && for name in vllm runai_model_streamer_gcs; do \\
        mkdir "$site/$name-0.0.dist-info" \\
        && printf 'Metadata-Version: 2.1\\nName: %s\\nVersion: 0.0\\n' $name >"$site/$name-0.0.dist-info/METADATA"; done
"""
LOCAL_TORCH = {"TORCH_INDEX": "file:///torch", "UV_NO_CACHE": "0"}


@cache
def buildah() -> tuple[str, ...]:
    """Return the start of every command: overlay where the kernel mounts it, and vfs, which is slower, elsewhere."""
    for driver in ("overlay", "vfs"):
        places = ("--root", str(WORK / f"storage-{driver}"), "--runroot", str(WORK / f"run-{driver}"))
        command = ("buildah", "--storage-driver", driver, *places)
        if subprocess.run([*command, "images"], capture_output=True).returncode == 0:
            break
    return command


class Failed(Exception):
    """A build or an entry point did something else than expected."""


@dataclass(frozen=True)
class Row:
    """One line of the table at the end."""

    role: str
    built: bool = False
    megabytes: int = 0
    seconds: float = 0.0
    did: str = ""


@dataclass(frozen=True)
class Container:
    """A container of a built image; every command starts as the image's user."""

    name: str
    root: Path  # where its file system is mounted
    config: Mapping[str, Any]

    def run(self, *command: str, expected: int = 0, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """Run a command, by default the entry point; returns its output. Raises Failed at another exit code."""
        options = [f"--env={key}={value}" for key, value in environment.items()]
        # Into a file: buildah 1.28 sometimes loses the output of a short command.
        words = ["bash", "-c", 'exec "$@" >/tmp/output 2>&1', "start", *(command or self.config["Entrypoint"])]
        run = [*buildah(), "run", "--network", "host", *options, self.name, "--", *words]
        done = subprocess.run(run, env=isolated(), capture_output=True, text=True, timeout=START_SECONDS)
        path = self.root / "tmp" / "output"
        output = path.read_text() if path.exists() else done.stderr
        if done.returncode != expected:
            name = " ".join(words[4:])[:60]
            raise Failed(f"{name} ended with {done.returncode}, expected {expected}\n{output[-3000:]}")
        return output


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("roles", nargs="*", metavar="ROLE", help=", ".join(STARTS))
    parser.add_argument("--keep", action="store_true", help="keep the images")
    parser.add_argument("--no-compile", action="store_true", help="compile modules as they are imported: less work")
    options = parser.parse_args(argv)
    if unknown := set(options.roles) - STARTS.keys():
        parser.error(f"there is no containers/{', '.join(sorted(unknown))}; expected {', '.join(STARTS)}")
    if missing := missing_here():
        print(f"No image was built: {missing}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        make_bases()
    except Failed as error:
        print(f"The stand-ins for the bases cannot be made: {error}", file=sys.stderr)
        return 1
    arguments = torch_for_cpus() | ({"UV_COMPILE_BYTECODE": "0"} if options.no_compile else {})
    rows = [build_and_start(role, arguments, keep=options.keep) for role in options.roles or STARTS]
    print_table(rows)
    return 0 if all(row.built and not row.did.startswith("FAILED") for row in rows) else 1


def missing_here() -> str:
    """Return what this machine lacks, or ""."""
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian's package {program})"
    if os.geteuid() != 0:
        return "it needs root, to mount the files of an image"
    if python_312() is None:
        return "there is no Python 3.12 in PATH, nor in pyenv's versions"
    free = shutil.disk_usage(ROOT).free
    return f"{free / 2**30:.0f} GiB of disk are free; expected {FREE_BYTES >> 30}" if free < FREE_BYTES else ""


def python_312() -> Path | None:
    """Return the folder of a Python 3.12, from tools/maxtext_env.py."""
    from tools.maxtext_env import find_python

    python = find_python()
    if python is None:
        return None
    code = "import sys; print(sys.base_prefix)"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def make_bases() -> None:
    """Make the two stand-ins for the bases, unless they are there."""
    prefix = python_312()
    key = hashlib.sha256(f"{prefix} {PYTHON_IMAGE} {VLLM_IMAGE}".encode()).hexdigest()
    stamp = WORK / "bases"
    if stamp.exists() and stamp.read_text() == key and image_exists("vllm"):
        return
    root = WORK / ROOT_TAR
    if not root.exists():
        say("making a Debian root")
        unfinished = root.with_suffix(".new.tar")
        packages = f"--include={','.join(PACKAGES)}"
        check("mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", str(unfinished))
        unfinished.rename(root)
    left_out = ["--exclude=test", "--exclude=__pycache__", "--exclude=site-packages/[!p]*", "--exclude=*.pth"]
    check("tar", "-C", str(prefix), *left_out, "-cf", str(WORK / "python.tar"), "bin", "include", "lib", "share")
    for name, text in (("python", PYTHON_IMAGE), ("vllm", VLLM_IMAGE)):
        say(f"making the stand-in base {name}")
        (WORK / f"{name}.Dockerfile").write_text(text)
        command = [*buildah(), "bud", "--network", "host", "--pull-never", "-t", f"localhost/{name}"]
        check(*command, "-f", str(WORK / f"{name}.Dockerfile"), str(WORK))
    stamp.write_text(key)


def torch_for_cpus() -> dict[str, str]:
    """Make an index with PyTorch for CPUs from what pip finds; returns the build arguments that use it."""
    from tools.lock import PYTORCH, pins

    version = pins((ROOT / "containers" / "torch_cpu.lock.txt").read_text())["torch"]
    folder = WORK / "torch" / "torch"
    for python in ("3.12", "3.11"):
        tag = f"cp{python.replace('.', '')}"
        if not list(folder.glob(f"torch-{version}-{tag}-*.whl")):
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", str(folder)]
            pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", *options]
            platform = "--platform=manylinux_2_28_x86_64"
            subprocess.run([*pip, platform, f"torch=={version}"], capture_output=True)
        if found := list(folder.glob(f"torch-{version}-{tag}-*.whl")):
            (folder / "index.html").write_text(f'<a href="{found[0].name.replace("+", "%2B")}">{found[0].name}</a>\n')
            program = "python3" if python == "3.12" else "/usr/bin/python3.11"
            return {**LOCAL_TORCH, "PYTHON": program, "TORCH_PYTHON": program}
    return {**LOCAL_TORCH, "TORCH_INDEX": f"{PYTORCH}/cpu"}


def build_and_start(role: str, arguments: Mapping[str, str], *, keep: bool) -> Row:
    began, row = time.monotonic(), Row(role)
    try:
        say(f"building {role}")
        context = context_digest()
        build(role, arguments)
        row = replace(row, built=True)
        with container(role) as started:
            row = replace(row, megabytes=write_facts(role, started, context))
            say(f"starting {role}")
            row = replace(row, did=STARTS[role](started))
    except (Failed, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        row = replace(row, did=f"FAILED: {str(error).splitlines()[0][:90]}")
    if not keep:
        subprocess.run([*buildah(), "rmi", f"localhost/{role}"], capture_output=True)
    return replace(row, seconds=time.monotonic() - began)


def build(role: str, arguments: Mapping[str, str]) -> None:
    """Build one image. Raises Failed."""
    dockerfile = ROOT / "containers" / role / "Dockerfile"
    known = {line.split("=")[0].removeprefix("ARG ") for line in dockerfile.read_text().splitlines() if "ARG " in line}
    given = {**arguments, "BASE": f"localhost/{'vllm' if role == 'serve_vllm' else 'python'}"}
    given["CUDA_LOCK"] = "containers/nothing.lock.txt"
    # vllm-tpu's PyTorch is of another version, which only PyTorch's index has.
    given["TORCH_LOCK"] = "containers/nothing.lock.txt" if role == "serve_vllm_tpu" else "containers/torch_cpu.lock.txt"
    command = [*buildah(), "bud", "--network", "host", "--pull-never", "-f", str(dockerfile), "-t", f"localhost/{role}"]
    command += [f"--build-arg={name}={value}" for name, value in given.items() if name in known]
    check(*command, *(f"--volume={source}:{target}" for source, target in mounts().items()), str(ROOT))


def mounts() -> dict[str, str]:
    """Return what a build sees of this machine, and no image keeps: uv's cache, the CPU wheel, how to reach PyPI."""
    from tools.uv import pip_setting

    index = pip_setting("index-url")
    (WORK / "pip.conf").write_text("[global]\n" + (f"index-url = {index}\n" if index else ""))
    uv = f'[[index]]\nurl = "{index}"\ndefault = true\n' if index else ""
    (WORK / "uv.toml").write_text(f"system-certs = true\n{uv}")
    for name in ("uv-cache", "torch"):
        (WORK / name).mkdir(exist_ok=True)
    shown = {"uv-cache": "/root/.cache/uv", "torch": "/torch:ro"}
    shown |= {"pip.conf": "/etc/pip.conf:ro", "uv.toml": "/etc/uv/uv.toml:ro"}
    return {"/etc/ssl/certs": "/etc/ssl/certs:ro", **{str(WORK / name): place for name, place in shown.items()}}


@contextmanager
def container(role: str) -> Iterator[Container]:
    name = check(*buildah(), "from", "--pull-never", f"localhost/{role}").strip()
    try:
        image = json.loads(check(*buildah(), "inspect", "--type", "image", f"localhost/{role}"))
        yield Container(name, Path(check(*buildah(), "mount", name).strip()), image["OCIv1"]["config"])
    finally:
        subprocess.run([*buildah(), "umount", name], capture_output=True)
        subprocess.run([*buildah(), "rm", name], capture_output=True)


def write_facts(role: str, started: Container, context: str) -> int:
    """Write what the image is to build/images-local/ROLE.json; returns its size in megabytes."""
    files = {
        f"/{path.relative_to(started.root)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((started.root / "app").rglob("*"))
        if path.is_file()
    }
    names = ("User", "Env", "WorkingDir", "Entrypoint", "Cmd", "Labels")
    config = {name: started.config.get(name) for name in names}
    facts = {"context": context, "config": config, "files": files}
    (WORK / f"{role}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return int(check("du", "-sm", str(started.root)).split()[0])


def context_digest() -> str:
    """Return a digest of everything that an image can contain, and of the Dockerfiles."""
    digest = hashlib.sha256((ROOT / ".dockerignore").read_bytes())
    for folder in ("console", "containers", "functions/dropforge"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def start_train_trl(started: Container) -> str:
    """Train the tiny model to a committed manifest, against the local stack's storage and Pub/Sub."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    from dropforge.run.artifacts import read_manifest, upload_directory, verify_manifest
    from dropforge_local import tiny
    from dropforge_local.base.clock import SystemClock
    from dropforge_local.base.db import Database
    from dropforge_local.base.server import BackgroundServer, Emulator
    from dropforge_local.emulators.pubsub import PubSubEmulator
    from dropforge_local.emulators.storage import StorageEmulator

    place, topic = WORK / "stack", "projects/local/topics/job-events"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()

    def emulators() -> list[Emulator]:
        db, clock = Database(place / "state.db"), SystemClock()
        pubsub = PubSubEmulator(db, clock)
        pubsub.create_topic(topic)
        return [StorageEmulator(db, place / "blobs", clock), pubsub]

    spec = json.loads((ROOT / "examples" / "local" / "cloud_run.json").read_text())
    spec["model"]["source"], spec["dataset"]["source"] = "gs://data/tiny", "gs://data/rows.jsonl"
    spec["evaluation"]["source"] = "gs://data/unseen.jsonl"
    spec["training"]["max_steps"] = 30
    # The container's user is another user of this machine than the stack's.
    with BackgroundServer(emulators, is_open=True) as server:
        endpoint = {"api_endpoint": server.url}
        client = storage.Client(project="local", credentials=AnonymousCredentials(), client_options=endpoint)
        runs, data = client.create_bucket("runs"), client.create_bucket("data")
        upload_directory(client, tiny.base_model(ROOT / "build" / "tiny"), "gs://data/tiny")
        data.blob("rows.jsonl").upload_from_filename(str(tiny.dataset(place / "rows.jsonl", rows=300)))
        unseen = tiny.dataset(place / "unseen.jsonl", rows=30, held_out=True)
        data.blob("unseen.jsonl").upload_from_filename(str(unseen))
        runs.blob("runs/local-run/spec.json").upload_from_string(json.dumps(spec))
        began = time.monotonic()
        environment = {
            "STORAGE_EMULATOR_HOST": server.url,
            "PUBSUB_EMULATOR_HOST": server.grpc_address,
            "HF_HUB_OFFLINE": "1",
            "DROPFORGE_CPU_STANDS_IN": "1",
            "DROPFORGE_PROJECT": "local",
            "DROPFORGE_RUN": "local-run",
            "DROPFORGE_ATTEMPT": "1",
            "DROPFORGE_RUNS_BUCKET": "runs",
            "DROPFORGE_JOB_EVENTS_TOPIC": topic,
        }
        started.run(environment=environment)
        manifest = read_manifest(client, "runs", "local-run")
        if manifest is None:
            raise Failed("the entry point ended with 0, but no manifest is committed")
        if problems := verify_manifest(client, "runs", manifest):
            raise Failed(f"the committed model differs from its manifest: {problems}")
        steps, loss = manifest.metrics["steps"], manifest.metrics["loss"]
        return f"{user(started)}: {steps:.0f} steps, loss {loss:.3f}, MANIFEST ({time.monotonic() - began:.0f} s)"


def start_train_maxtext(started: Container) -> str:
    said = refuses(started, "DROPFORGE_PROJECT is not set")
    versions = started.run("/opt/maxtext/bin/python", "-c", "import jax, maxtext; print('jax', jax.__version__)")
    versions += started.run(
        "/opt/torch/bin/python", "-c", "import torch, transformers; print('torch', torch.__version__)"
    )
    return f"{said}; imports {', '.join(line for line in versions.splitlines() if line.startswith(('jax', 'torch')))}"


def start_train_ray(started: Container) -> str:
    """The RayJob's command gets to its checks; a head comes up, and KubeRay's exec probes succeed inside the image."""
    said = refuses(started, "DROPFORGE_PROJECT is not set")
    output = started.run("bash", "-c", RAY_HEAD, "head", *map(str, free_ports(5)))
    answers = [line for line in output.splitlines() if "wget's probes" in line]
    return f"{said}; {answers[0]}"


# The probes: KubeRay 1.5.1, ray-operator/controllers/ray/utils/constant.go. Free ports, because other heads may run on
# this machine. No `ray stop`: it would look for Ray's processes of other containers too.
RAY_HEAD = """
trap 'kill $head; wait $head' EXIT
for try in $(seq 300); do
    if ! kill -0 $head; then  # Ray waits 30 s for its own processes: on a busy machine a head may need several tries
        ray start --head --block --disable-usage-stats --num-cpus 1 --object-store-memory 100000000 --port $1 \\
            --dashboard-port $2 --dashboard-agent-listen-port $3 --dashboard-agent-grpc-port $4 \\
            --ray-client-server-port $5 &
        head=$!
    fi
    wget --tries 1 -T 2 -q -O- http://localhost:$3/api/local_raylet_healthz | grep success \\
        && wget --tries 1 -T 10 -q -O- http://localhost:$2/api/gcs_healthz | grep success \\
        && echo "a Ray head, and wget's probes succeed" && exit 0
    sleep 1
done
exit 1
"""


def start_serve_vllm(started: Container) -> str:
    said = refuses(started, "DROPFORGE_MODEL_URI is ''")
    code = (
        "import os; from containers.serve_vllm.engine import Settings, vllm_argv;"
        "words = vllm_argv(Settings.from_environment(), 'gs://runs/models/x'); os.execvp(words[0], words)"
    )
    settings = {"DROPFORGE_MODEL_URI": "gs://runs/models/x", "DROPFORGE_SERVED_MODEL_NAME": "x"}
    became = started.run(started.config["Entrypoint"][0], "-c", code, environment=settings)
    if not became.startswith("vllm of /usr/local serve gs://runs/models/x"):
        raise Failed(f"expected the base image's vllm in the base image's Python, but: {became}")
    return f"{said}; then becomes the base's vllm"


def start_serve_vllm_tpu(started: Container) -> str:
    said = refuses(started, "DROPFORGE_MODEL_URI is ''")
    version = started.run("python", "-c", "import jax; print('jax', jax.__version__)").strip().splitlines()[-1]
    return f"{said}; imports {version}; vllm not imported: no PyTorch here"


def refuses(started: Container, message: str) -> str:
    """Start the entry point without settings: it ends with 64 and says what is missing."""
    output = started.run(expected=64)
    if message not in output:
        raise Failed(f"expected {message!r} in the output of the entry point: {output[-500:]}")
    return f"{user(started)}: exit 64, settings missing"


def user(started: Container) -> str:
    uid = started.run("id", "-u").strip().splitlines()[-1]
    if uid != started.config["User"]:
        raise Failed(f"the command runs as user {uid}, expected {started.config['User']}")
    return f"UID {uid}"


def start_console(started: Container) -> str:
    """Without settings it ends; with them it answers, and lets nobody in who did not pass Identity-Aware Proxy."""
    from dropforge.base.settings import Settings

    said = refuses(started, "DROPFORGE_PROJECT is not set")
    (port,) = free_ports(1)
    required = [field.name for field in fields(Settings) if field.default is MISSING]
    environment = {f"DROPFORGE_{name.upper()}": "local" for name in required}
    environment |= {
        "PORT": str(port),
        "STORAGE_EMULATOR_HOST": "http://localhost:1",  # no credentials here; nobody gets far enough to read a bucket
        "DROPFORGE_CONSOLE_URL": f"https://localhost:{port}",
        "DROPFORGE_CONSOLE_AUDIENCE": "/projects/1/locations/local/services/console",
    }
    return f"{said}; {started.run('python', '-c', ASK_CONSOLE, environment=environment).splitlines()[-1]}"


ASK_CONSOLE = """
import os, subprocess, sys, time, urllib.error, urllib.request
console = subprocess.Popen([sys.executable, "-m", "dropforge_console"])
port = os.environ["PORT"]
while True:
    assert console.poll() is None, "the console has ended"
    try:
        urllib.request.urlopen(f"http://localhost:{port}/runs")
    except urllib.error.HTTPError as error:
        assert error.code == 401, error
        break
    except OSError:
        time.sleep(0.1)
console.terminate()
assert console.wait() == 0
print("answers 401 without an assertion, and ends with SIGTERM")
"""


STARTS: dict[str, Callable[[Container], str]] = {
    "console": start_console,
    "train_trl": start_train_trl,
    "serve_vllm": start_serve_vllm,
    "train_maxtext": start_train_maxtext,
    "train_ray": start_train_ray,
    "serve_vllm_tpu": start_serve_vllm_tpu,
}


def free_ports(count: int) -> tuple[int, ...]:
    from dropforge_local.base.ports import free_port

    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port(range(20000, 30000), ports))
    return tuple(ports)


def image_exists(name: str) -> bool:
    return (
        subprocess.run([*buildah(), "inspect", "--type", "image", f"localhost/{name}"], capture_output=True).returncode
        == 0
    )


def check(*command: str) -> str:
    """Run a command of this machine; returns its output. Raises Failed with the end of its output."""
    done = subprocess.run(command, env=isolated(), capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        raise Failed(f"{command[0]} ended with {done.returncode}: {output.splitlines()[-1]}\n{output[-3000:]}")
    return done.stdout


def isolated() -> dict[str, str]:
    """chroot isolation needs no container runtime and no rights beyond those of a build."""
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def print_table(rows: list[Row]) -> None:
    print(f"\n{'image':16}{'built':7}{'MB':>6}{'s':>6}  entry point")
    for row in rows:
        print(f"{row.role:16}{'yes' if row.built else 'no':7}{row.megabytes:6}{row.seconds:6.0f}  {row.did}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
