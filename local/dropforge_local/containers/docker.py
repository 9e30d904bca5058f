"""`docker` on an emulated machine: images are read from their Dockerfiles, a container is a child process.

Knows `login`, `pull`, `run` in the foreground, `stop`, `rm`, and of `inspect` whether memory ran out, with the options
that make sense here; anything else is refused. Exit codes are Docker's: 125 for its own failures, else the container's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .images import ImageNotFound, ImageStore
from .processes import MARKER

SETTINGS = "etc/dropforge-docker.json"
OOM_KILLED = "{{.State.OOMKilled}}"  # what may be asked of a container
FAILED = 125
STOP_SECONDS = 10.0
# What every process of the machine has, and a container's must have as well.
INHERITED = (MARKER, "LANG", "TMPDIR", "GCE_METADATA_HOST", "GCE_METADATA_IP")


def configure(root: Path, images: ImageStore, environment: Mapping[str, str]) -> None:
    """Tell the `docker` of the machine whose files are below `root` which images there are, and what the platform
    puts in every container's environment."""
    settings = {"images": str(images.root), "directory": str(images.directory), "environment": dict(environment)}
    (root / SETTINGS).write_text(json.dumps(settings))


def run_out_of_memory(root: Path) -> int:
    """Do to the containers of a machine what its kernel does when the memory is full; how many there were."""
    running = [path for path in _containers(root).glob("*") if _is_running(root, path.name)]
    for path in running:
        (path / "oom-killed").touch()
        _signal_container(root, path.name, signal.SIGKILL)
    return len(running)


class DockerError(Exception):
    """Docker itself failed; the container did not start."""


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    root = Path(os.environ["DROPFORGE_ROOT"])
    try:
        code: int = options.command(root, options)
        return code
    except (DockerError, ImageNotFound) as error:
        print(f"docker: Error response from daemon: {error}", file=sys.stderr)
        return FAILED


def login(root: Path, options: argparse.Namespace) -> int:
    """Keeps what a real one would keep, where it would: in $DOCKER_CONFIG."""
    password = sys.stdin.read().strip()
    if not password:
        raise DockerError("login: password is empty")
    home = Path(os.environ.get("DOCKER_CONFIG") or Path(os.environ["HOME"], ".docker"))
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "config.json").write_text(json.dumps({"auths": {options.server: {"auth": "kept"}}}))
    print("Login Succeeded")
    return 0


def pull(root: Path, options: argparse.Namespace) -> int:
    images, _ = _read_settings(root)
    try:
        image = images.resolve(options.image)
    except ImageNotFound as error:
        raise DockerError(f"manifest for {options.image} not found: manifest unknown: {error}") from error
    print(f"Digest: {image.digest}\nStatus: Downloaded newer image for {options.image}")
    return 0


def run(root: Path, options: argparse.Namespace) -> int:
    images, platform = _read_settings(root)
    image = images.resolve(options.image)
    name = options.name or uuid.uuid4().hex
    points = dict(_mount_points(options.volume))
    with _directory(root, name, keep=not options.rm) as directory:
        env = {**platform, **dict(_variables(options.env))}
        process = image.unpack(directory / "rootfs", (), options.words, env, mounts=points)
        inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
        home = directory / "home"
        home.mkdir()
        # Not the machine's PATH, which has this `docker` on it. An image's own comes last, as in `Runtime`.
        path = [*process.search_path, *images.search_path, "/usr/local/bin", "/usr/bin", "/bin"]
        own = {"HOME": str(home), **process.env}
        whole = {**inherited, **own, "PATH": os.pathsep.join([*map(str, path), own.get("PATH", "")])}
        return _run(directory, process.argv, whole, process.workdir)


def stop(root: Path, options: argparse.Namespace) -> int:
    _pid(root, options.name)
    _signal_container(root, options.name, signal.SIGTERM)
    deadline = time.monotonic() + options.time
    while _is_running(root, options.name) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_container(root, options.name, signal.SIGKILL)
    print(options.name)
    return 0


def remove(root: Path, options: argparse.Namespace) -> int:
    _pid(root, options.name)
    if _is_running(root, options.name) and not options.force:
        raise DockerError(f"cannot remove container {options.name!r}: container is running")
    _signal_container(root, options.name, signal.SIGKILL)
    shutil.rmtree(_containers(root) / options.name, ignore_errors=True)
    print(options.name)
    return 0


def inspect(root: Path, options: argparse.Namespace) -> int:
    _pid(root, options.name)
    print(str((_containers(root) / options.name / "oom-killed").exists()).lower())
    return 0


def _read_settings(root: Path) -> tuple[ImageStore, dict[str, str]]:
    settings = json.loads((root / SETTINGS).read_text())
    images = ImageStore(Path(settings["images"]), Path(settings["directory"]), Path(sys.executable))
    return images, settings["environment"]


def _run(directory: Path, argv: Sequence[str], env: Mapping[str, str], workdir: Path) -> int:
    """Run a container to its end and pass on what it is asked; what it leaves running ends with it."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    process = subprocess.Popen(argv, env=dict(env), cwd=workdir, stdin=subprocess.DEVNULL, start_new_session=True)
    (directory / "pid").write_text(str(process.pid))
    # Whatever came before the handler knew the process is passed on late, but once.
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    for early in stopped:
        process.send_signal(early)
    code = process.wait()
    _signal(process.pid, signal.SIGKILL)
    (directory / "ended").touch()  # its number may be another process's from now on
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _directory(root: Path, name: str, *, keep: bool) -> Iterator[Path]:
    directory = _containers(root) / name
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise DockerError(
            f'Conflict. The container name "/{name}" is already in use. You have to remove (or rename) it.'
        ) from None
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _containers(root: Path) -> Path:
    return root / "run/docker/containers"


def _pid(root: Path, name: str) -> int:
    try:
        return int((_containers(root) / name / "pid").read_text())
    except FileNotFoundError:
        raise DockerError(f"No such container: {name}") from None


def _is_running(root: Path, name: str) -> bool:
    if (_containers(root) / name / "ended").exists():
        return False
    try:
        os.killpg(_pid(root, name), 0)
    except (ProcessLookupError, PermissionError, DockerError):
        return False
    return True


def _signal_container(root: Path, name: str, number: signal.Signals) -> None:
    """Nothing happens once it has ended: its number may be another process's by then."""
    if _is_running(root, name):
        _signal(_pid(root, name), number)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _variables(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """NAME=VALUE, or NAME alone for docker's own value of it, if it has one."""
    for word in words:
        name, given, value = word.partition("=")
        if given or name in os.environ:
            yield name, value if given else os.environ[name]


def _mount_points(words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for word in words:
        source, _, rest = word.partition(":")
        target = rest.partition(":")[0]
        if not source.startswith("/") or not target.startswith("/"):
            raise DockerError(f"invalid volume specification: {word!r}; expected /source:/target[:options]")
        Path(source).mkdir(parents=True, exist_ok=True)
        yield target, Path(source)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("docker", allow_abbrev=False, exit_on_error=False)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("login")
    one.add_argument("--username", "-u", required=True)
    one.add_argument("--password-stdin", action="store_true", required=True)
    one.add_argument("server")
    one.set_defaults(command=login)
    one = commands.add_parser("pull")
    one.add_argument("--quiet", "-q", action="store_true")
    one.add_argument("image")
    one.set_defaults(command=pull)
    one = commands.add_parser("run", allow_abbrev=False)
    one.add_argument("--rm", action="store_true")
    one.add_argument("--name", default="")
    one.add_argument("--env", "-e", action="append", default=[])
    one.add_argument("--volume", "-v", action="append", default=[])
    # Without isolation there is nothing for these to change.
    for flag in ("--privileged", "--init"):
        one.add_argument(flag, action="store_true")
    for option in ("--network", "--net", "--shm-size", "--stop-timeout", "--log-driver", "--user"):
        one.add_argument(option)
    one.add_argument("image")
    one.add_argument("words", nargs=argparse.REMAINDER)
    one.set_defaults(command=run)
    one = commands.add_parser("stop")
    one.add_argument("--time", "-t", type=float, default=STOP_SECONDS)
    one.add_argument("name")
    one.set_defaults(command=stop)
    one = commands.add_parser("rm")
    one.add_argument("--force", "-f", action="store_true")
    one.add_argument("name")
    one.set_defaults(command=remove)
    one = commands.add_parser("inspect")
    one.add_argument("--format", "-f", choices=[OOM_KILLED], required=True)
    one.add_argument("name")
    one.set_defaults(command=inspect)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
