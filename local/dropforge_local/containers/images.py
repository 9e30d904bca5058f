"""Container images without Docker: a URI names containers/<role>/, whose Dockerfile defines the image's content.

The final stage's COPYs become a root file system directory, so a forgotten COPY fails here as it would in the cloud;
installed packages come from the local virtual environment, without this repository's own packages. A label names other
environments that RUN creates: `dev.dropforge.environments="/opt/maxtext=maxtext /opt/torch=venv"` maps /opt/maxtext to
build/maxtext (`make maxtext`) and /opt/torch to the local stack's own environment ("venv"). Another label names
environments that stand for the image's base: with `dev.dropforge.base="vllm"`, the programs of build/vllm are on the
PATH, after the image's own, if the stack is configured with "vllm".
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .dockerfile import Stage, UnsupportedDockerfile, evaluate
from .mounts import link
from .programs import programs_of

log = logging.getLogger(__name__)

URI = re.compile(
    r"(?:\w[\w.-]*(?::\d+)?/)*(?P<name>[a-z0-9]+(?:[._-][a-z0-9]+)*)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:\w{64}))?"
)
ENVIRONMENTS = "dev.dropforge.environments"
BASE = "dev.dropforge.base"
PYTHON = re.compile(r"(?:/[\w./-]*/)?python(?:3(?:\.\d+)?)?")
ABSOLUTE_PATH = re.compile(r"(?:^|(?<=[:=,\s\"']))/[^:=,\s\"']*")
# Directories that the machine also has: only the files that the image put there belong to the image.
SHARED_DIRECTORIES = re.compile(r"/|/(bin|boot|dev|etc|lib\w*|media|mnt|opt|proc|run|sbin|srv|sys|tmp|usr|var)(/.*)?")


class ImageNotFound(Exception):
    """No such image: Cloud Run shows it as CONTAINER_MISSING, Kubernetes as ErrImagePull."""


@dataclass(frozen=True)
class Process:
    """A command with its environment and working directory; all paths are paths of this machine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: Path
    search_path: tuple[Path, ...] = ()  # comes first on PATH


@dataclass(frozen=True)
class Image:
    """A built image. Paths in `workdir`, `entrypoint`, `cmd` and `env` are the container's; `unpack` maps them."""

    uri: str
    digest: str
    rootfs: Path
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: Mapping[str, str]
    python: Path
    own_paths: frozenset[str] = field(default_factory=frozenset)
    environments: Mapping[str, Path] = field(default_factory=dict)
    programs: frozenset[str] = frozenset()  # names, beside those of its own files and its environments
    base_programs: tuple[Path, ...] = ()  # directories

    def unpack(
        self,
        rootfs: Path,
        command: Sequence[str] = (),
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str = "",
        mounts: Mapping[str, Path] = MappingProxyType({}),
    ) -> Process:
        """Give one container its own writable copy of the files; `command` and `args` override as in Kubernetes.

        `mounts` maps the volumes' paths in the container to directories. Raises ValueError when neither the image nor
        the caller names a command.
        """
        shutil.copytree(self.rootfs, rootfs)
        link(rootfs, mounts)
        return self.process(rootfs, command, args, env, workdir, mounts)

    def process(
        self,
        rootfs: Path,
        command: Sequence[str] = (),
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str = "",
        mounts: Mapping[str, Path] = MappingProxyType({}),
    ) -> Process:
        """A command in files that `unpack` has copied to `rootfs`; the parameters are those of `unpack`."""
        places = self._places(rootfs, mounts)
        words = [*(command or self.entrypoint), *(args or (() if command else self.cmd))]
        if not words:
            raise ValueError(f"image {self.uri!r} has no ENTRYPOINT or CMD and the container no command")
        merged = {**self.env, **(env or {})}
        programs = tuple(self._programs(merged.get("PATH", "")))
        python = programs[0] / "python" if programs and "/" not in words[0] else self.python
        mapped = _map(words[0], places)
        words[0] = str(python) if mapped == words[0] and PYTHON.fullmatch(mapped) else mapped
        directory = rootfs / (workdir or self.workdir)[1:]
        directory.mkdir(parents=True, exist_ok=True)
        return Process(
            argv=(words[0], *(_map(word, places) for word in words[1:])),
            env={name: _map(value, places) for name, value in merged.items()},
            workdir=directory,
            search_path=(*programs, *self.base_programs),
        )

    def program_directories(self, rootfs: Path, env: Mapping[str, str]) -> list[Path]:
        """The directories of the image's own programs by the PATH in `env`, whose paths are the container's."""
        path = {**self.env, **env}.get("PATH", "")
        given = list(self._programs(path)) or [self.python.parent]
        own = [rootfs / entry[1:] for entry in path.split(":") if entry.startswith("/")]
        return [*(directory for directory in own if directory.is_dir()), *given]

    def _programs(self, path: str) -> Iterator[Path]:
        """Program directories of the environments on the image's PATH; the interpreter's directory comes first."""
        for own in path.split(":"):
            if (here := self.environments.get(own.removesuffix("/bin"))) and own.endswith("/bin"):
                yield here / "bin"
                yield (here / "bin" / "python").readlink().parent

    def _places(self, rootfs: Path, mounts: Mapping[str, Path]) -> dict[str, str]:
        """This machine's paths by the container's paths; when paths are nested, the longer path counts."""
        own = {path: f"{rootfs}{path}" for path in self.own_paths}
        given = {path: str(here) for path, here in {**self.environments, **mounts}.items()}
        places = {**own, **given}
        return {path: places[path] for path in sorted(places, key=len, reverse=True)}


def _map(text: str, places: Mapping[str, str]) -> str:
    """Replace paths of the container, also in lists (PYTHONPATH) and options (--config=/app/x). A single pass, because
    a replacement may begin like another path of the container."""

    def real(path: str) -> str:
        for known, here in places.items():
            if path == known or path.startswith(f"{known}/"):
                return f"{here}{path.removeprefix(known)}"
        return path

    return ABSOLUTE_PATH.sub(lambda match: real(match[0]), text)


class ImageStore:
    """Resolves image URIs against containers/ of a repository; `python` is the environment with the packages.

    `bases` are the environments that stand for the bases of images, by their names in build/.
    """

    def __init__(self, root: Path, directory: Path, python: Path, bases: Collection[str] = ()) -> None:
        self.root = root.resolve()
        self.directory = directory.resolve()
        self.bases = sorted(bases)
        self._environment = python.absolute().parent.parent
        self._hashes: dict[Path, tuple[tuple[int, int], str]] = {}
        self.python = self._isolated(python.absolute(), self._environment, self.directory / "python")

    @property
    def search_path(self) -> list[Path]:
        """Directories for PATH: the isolated python, then the console scripts of the environment."""
        return list(dict.fromkeys([self.python.parent, self._environment / "bin"]))

    def resolve(self, uri: str) -> Image:
        """The image as its Dockerfile is now. Raises ImageNotFound: no such role, another digest, or no build."""
        match = URI.fullmatch(uri)
        if match is None:
            raise ImageNotFound(f"image {uri!r} is not an image reference; expected <path>/<name>[:tag][@sha256:…]")
        role = match["name"].replace("-", "_")
        dockerfile = self.root / "containers" / role / "Dockerfile"
        if not dockerfile.is_file():
            raise ImageNotFound(f"image {uri!r} not found: there is no containers/{role}/Dockerfile")
        try:
            stage = evaluate(dockerfile, self.root)
        except UnsupportedDockerfile as error:
            raise ImageNotFound(f"image {uri!r} cannot be built: {error}") from error
        digest = self._digest(stage)
        if match["digest"] not in (None, digest) and match["tag"] is None:
            raise ImageNotFound(f"image {uri!r} not found: containers/{role} is {digest} now")
        return self._image(uri, stage, digest)

    def _environments(self, uri: str, stage: Stage) -> dict[str, Path]:
        """This machine's environments for the environments that the image's label names, by their path in the image."""
        environments = {}
        for word in stage.labels.get(ENVIRONMENTS, "").split():
            path, _, name = word.partition("=")
            if name == "venv":
                environments[path] = self.python.parent.parent
            else:
                made = self._made(uri, name)
                python = self._isolated(made / "bin" / "python", made, self.directory / f"python-{name}")
                environments[path] = python.parent.parent
        return environments

    def _made(self, uri: str, name: str) -> Path:
        """The environment build/<name>. Raises ImageNotFound."""
        environment = self.root / "build" / name
        if not (environment / "bin" / "python").exists():
            raise ImageNotFound(f"image {uri!r} cannot be built: {environment} is not there; run `make {name}`")
        return environment

    def _image(self, uri: str, stage: Stage, digest: str) -> Image:
        owned = {path for path in stage.directories if not SHARED_DIRECTORIES.fullmatch(path)} | set(stage.files)
        return Image(
            uri=uri,
            digest=digest,
            rootfs=self._materialise(stage, digest),
            workdir=stage.workdir,
            entrypoint=stage.entrypoint,
            cmd=stage.cmd,
            env=stage.env,
            python=self.python,
            own_paths=frozenset(owned),
            environments=self._environments(uri, stage),
            programs=programs_of(stage.packages),
            base_programs=tuple(
                self._made(uri, name) / "bin" for name in stage.labels.get(BASE, "").split() if name in self.bases
            ),
        )

    def _digest(self, stage: Stage) -> str:
        """sha256 over the configuration and every file's path, mode and content."""
        config = [stage.user, stage.workdir, stage.entrypoint, stage.cmd, stage.env, stage.labels]
        config += [sorted(stage.directories), sorted(stage.packages)]
        files = [(name, os.access(path, os.X_OK), self._hash(path)) for name, path in sorted(stage.files.items())]
        return "sha256:" + hashlib.sha256(json.dumps([config, files], sort_keys=True).encode()).hexdigest()

    def _hash(self, path: Path) -> str:
        status = path.stat()
        key = (status.st_mtime_ns, status.st_size)
        if (known := self._hashes.get(path)) and known[0] == key:
            return known[1]
        with path.open("rb") as file:
            value = hashlib.file_digest(file, "sha256").hexdigest()
        self._hashes[path] = (key, value)
        return value

    def _materialise(self, stage: Stage, digest: str) -> Path:
        rootfs = self.directory / digest.removeprefix("sha256:")
        if rootfs.is_dir():
            return rootfs
        for note in stage.notes:
            log.info("image %s: %s", digest[:19], note)
        temporary = self.directory / f"{rootfs.name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        for name in sorted(stage.directories | {"/"}):
            (temporary / name[1:]).mkdir(parents=True, exist_ok=True)
        for name, path in stage.files.items():
            target = temporary / name[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        try:
            temporary.rename(rootfs)
        except OSError:  # another process built the same image meanwhile
            shutil.rmtree(temporary)
        return rootfs

    def _isolated(self, python: Path, environment: Path, home: Path) -> Path:
        """An interpreter, below `home`, with the environment's packages, but without its .pth files.

        An editable install puts this repository on sys.path with such a file. Then a container would import code that
        its Dockerfile forgot to COPY, and fail in the cloud only.
        """
        config = environment / "pyvenv.cfg"
        packages = sorted(environment.glob("lib/python3*/site-packages"))
        if not config.is_file() or not packages:
            return python
        site = home / packages[0].relative_to(environment)
        site.mkdir(parents=True, exist_ok=True)
        (home / "bin").mkdir(exist_ok=True)
        # Python reads .pth files only in its own site-packages, not in the directories that these files add.
        files = {home / "pyvenv.cfg": config.read_text(), site / "environment.pth": f"{packages[0]}\n"}
        for path, text in files.items():
            if not path.exists() or path.read_text() != text:  # containers that start now read it
                path.write_text(text)
        for name in ("python", "python3", python.name):
            link = home / "bin" / name
            if not link.is_symlink() or Path(os.readlink(link)) != python:
                link.unlink(missing_ok=True)
                link.symlink_to(python)
        return home / "bin" / "python"
