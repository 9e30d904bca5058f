"""`docker` on an emulated machine: an image is read from its Dockerfile, a container is a child process.

Supports `login`, `pull`, `run` in the foreground, `stop`, `rm`, and `inspect` of a container's end, with the options
that make sense here; refuses everything else. `shut-down` stands for the end of the daemon, which stops all
containers. Exit codes as Docker's: 125 when Docker fails, else the container's exit code.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shim import MARKER, takes_signal

if TYPE_CHECKING:
    from .images import Image, ImageStore

SETTINGS = "etc/dropforge-docker.json"
STATE = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"  # the only supported format of `inspect`
FAILED = 125
KILLED = 137
STOP_SECONDS = 10.0
# Variables that every process of the machine has; a container's process must have them too.
INHERITED = (MARKER, "LANG", "TMPDIR", "GCE_METADATA_HOST", "GCE_METADATA_IP")


def configure(root: Path, images: ImageStore, environment: Mapping[str, str]) -> None:
    """Configure `docker` on the machine whose files are below `root`: its images, and the environment that the platform
    gives every container."""
    settings = {
        "images": str(images.root),
        "directory": str(images.directory),
        "bases": images.bases,
        "environment": dict(environment),
    }
    (root / SETTINGS).write_text(json.dumps(settings))


def run_out_of_memory(root: Path) -> int:
    """Kill the machine's containers as its kernel does when memory is full; return how many ran."""
    running = [path for path in _containers(root).glob("*") if _is_running(root, path.name)]
    for path in running:
        (path / "oom-killed").touch()
        _kill_container(root, path.name)
    return len(running)


class DockerError(Exception):
    """Docker itself failed; the container did not start."""


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    root = Path(os.environ["DROPFORGE_ROOT"])
    try:
        code: int = options.command(root, options)
        return code
    except DockerError as error:
        print(f"docker: Error response from daemon: {error}", file=sys.stderr)
        return FAILED


def login(root: Path, options: argparse.Namespace) -> int:
    """Write the credentials file where Docker writes it: in $DOCKER_CONFIG."""
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
        image = _resolve(images, options.image)
    except DockerError as error:
        raise DockerError(f"manifest for {options.image} not found: manifest unknown: {error}") from error
    print(f"Digest: {image.digest}\nStatus: Downloaded newer image for {options.image}")
    return 0


def run(root: Path, options: argparse.Namespace) -> int:
    images, platform = _read_settings(root)
    image = _resolve(images, options.image)
    name = options.name or uuid.uuid4().hex
    points = dict(_mount_points(options.volume))
    with _directory(root, name, keep=not options.rm) as directory:
        env = {**platform, **dict(_variables(options.env))}
        (directory / "stop-timeout").write_text(str(options.stop_timeout))
        process = image.unpack(directory / "rootfs", (), options.words, env, mounts=points)
        inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
        home = directory / "home"
        home.mkdir()
        # Not the machine's PATH, which contains this `docker`. An image's own PATH comes last, as in `Runtime`.
        path = [*process.search_path, *images.search_path, "/usr/local/bin", "/usr/bin", "/bin"]
        own = {"HOME": str(home), **process.env}
        whole = {**inherited, **own, "PATH": os.pathsep.join([*map(str, path), own.get("PATH", "")])}
        return _run(directory, process.argv, whole, process.workdir)


def stop(root: Path, options: argparse.Namespace) -> int:
    _pid(root, options.name)
    _end(root, {options.name: options.time})
    print(options.name)
    return 0


def shut_down(root: Path, options: argparse.Namespace) -> int:
    """Stop every container as dockerd does at its own SIGTERM: each has its `run --stop-timeout`, or 10 s."""
    running = [path for path in _containers(root).glob("*") if _is_running(root, path.name)]
    _end(root, {path.name: float((path / "stop-timeout").read_text()) for path in running})
    return 0


def _end(root: Path, patience: Mapping[str, float]) -> None:
    """Send SIGTERM to containers, and SIGKILL to each that runs after its seconds in `patience`."""
    for name in patience:
        if _is_running(root, name):
            _stop_process(_pid(root, name))
    began = time.monotonic()
    while running := [name for name in patience if _is_running(root, name)]:
        for name in running:
            if time.monotonic() >= began + patience[name]:
                _kill_container(root, name)
        time.sleep(0.05)


def remove(root: Path, options: argparse.Namespace) -> int:
    _pid(root, options.name)
    if _is_running(root, options.name) and not options.force:
        raise DockerError(f"cannot remove container {options.name!r}: container is running")
    _kill_container(root, options.name)
    shutil.rmtree(_containers(root) / options.name, ignore_errors=True)
    print(options.name)
    return 0


def inspect(root: Path, options: argparse.Namespace) -> int:
    """Print STATE. The exit code is 0 while the container runs, and KILLED if its `docker run` was killed too."""
    _pid(root, options.name)
    directory = _containers(root) / options.name
    running = _is_running(root, options.name)
    ended = directory / "ended"
    code = 0 if running else int(ended.read_text()) if ended.exists() else KILLED
    print("running" if running else "exited", code, str((directory / "oom-killed").exists()).lower())
    return 0


def _read_settings(root: Path) -> tuple[ImageStore, dict[str, str]]:
    from .images import ImageStore  # its imports take most of the time of a command; most commands need no image

    settings = json.loads((root / SETTINGS).read_text())
    images = ImageStore(Path(settings["images"]), Path(settings["directory"]), Path(sys.executable), settings["bases"])
    return images, settings["environment"]


def _resolve(images: ImageStore, uri: str) -> Image:
    from .images import ImageNotFound

    try:
        return images.resolve(uri)
    except ImageNotFound as error:
        raise DockerError(str(error)) from error


def _run(directory: Path, argv: Sequence[str], env: Mapping[str, str], workdir: Path) -> int:
    """Run a container to its end and forward signals to it; its remaining processes end with it."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    process = subprocess.Popen(argv, env=dict(env), cwd=workdir, stdin=subprocess.DEVNULL, start_new_session=True)
    (directory / "pid").write_text(str(process.pid))
    # Signals that arrived before the process existed are forwarded now, once.
    signal.signal(signal.SIGTERM, lambda *_: _stop_process(process.pid))
    for early in stopped:
        process.send_signal(early)
    code = process.wait()
    _kill(process.pid)
    code = 128 - code if code < 0 else code
    partial = directory / "ended.tmp"
    partial.write_text(str(code))
    partial.rename(directory / "ended")  # from now on another process may have this pid
    return code


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


def _kill_container(root: Path, name: str) -> None:
    """Do nothing once the container has ended: another process may have its pid by then."""
    if _is_running(root, name):
        _kill(_pid(root, name))


def _stop_process(pid: int) -> None:
    """Send SIGTERM to the first process of a container, unless the kernel would discard the signal."""
    if takes_signal(pid, signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _variables(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Variables given as NAME=VALUE, or as NAME for docker's own value of the variable, if it is set."""
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
    parse = _command(commands, "login", login, "server")
    parse.add_argument("--username", "-u", required=True)
    parse.add_argument("--password-stdin", action="store_true", required=True)
    _command(commands, "pull", pull, "image").add_argument("--quiet", "-q", action="store_true")
    _add_run(commands)
    _command(commands, "stop", stop, "name").add_argument("--time", "-t", type=float, default=STOP_SECONDS)
    commands.add_parser("shut-down").set_defaults(command=shut_down)
    _command(commands, "rm", remove, "name").add_argument("--force", "-f", action="store_true")
    _command(commands, "inspect", inspect, "name").add_argument("--format", "-f", choices=[STATE], required=True)
    return parser


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", run, "image")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--name", default="")
    parser.add_argument("--env", "-e", action="append", default=[])
    parser.add_argument("--volume", "-v", action="append", default=[])
    # Accepted without effect: containers are not isolated here.
    for flag in ("--privileged", "--init"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--stop-timeout", type=float, default=STOP_SECONDS)
    for option in ("--network", "--net", "--shm-size", "--log-driver", "--user"):
        parser.add_argument(option)


def _command(commands: Any, name: str, work: Callable[..., int], argument: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=name != "run")
    parser.add_argument(argument)
    parser.set_defaults(command=work)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
