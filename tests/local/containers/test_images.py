"""Images: the content of a Dockerfile's final stage, without Docker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from dropforge_local.containers.dockerfile import UnsupportedDockerfile, evaluate, parse
from dropforge_local.containers.images import ImageNotFound, ImageStore

URI = "us-central1-docker.pkg.dev/local-project/dropforge/train-trl"


def write(root: Path, dockerfile: str, files: Mapping[str, str] = MappingProxyType({})) -> Path:
    role = root / "containers" / "train_trl"
    role.mkdir(parents=True, exist_ok=True)
    (role / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return role / "Dockerfile"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "repo", tmp_path / "images", Path(sys.executable))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    return tmp_path / "repo"


def test_final_stage_gives_files_command_and_environment(root: Path, store: ImageStore) -> None:
    write(
        root,
        """# syntax=docker/dockerfile:1
ARG BASE=python:3.11
FROM ${BASE} AS build
WORKDIR /build
RUN pip install --prefix=/install \\
    # a comment inside
    torch
FROM build
FROM $BASE
ARG VERSION=7
ENV PYTHONPATH=/app APP_VERSION="v${VERSION}" NOTE=${MISSING:-none}
WORKDIR /app
COPY --from=build /install /usr/local
COPY --link --chown=1:1 functions/dropforge dropforge/
COPY ["containers/train_trl/train.py", "./"]
RUN <<EOF
COPY nonsense /here
EOF
EXPOSE 8080
USER nobody
ENTRYPOINT ["python", "/app/train.py"]
CMD ["--config", "/app/dropforge/config"]
""",
        {
            "functions/dropforge/x.py": "X = 1",
            "functions/dropforge/__pycache__/y": "old",
            "containers/train_trl/train.py": "print('hello')",
        },
    )
    image = store.resolve(f"{URI}:latest")
    assert sorted(path.relative_to(image.rootfs).as_posix() for path in image.rootfs.rglob("*") if path.is_file()) == [
        "app/dropforge/x.py",
        "app/train.py",
    ]
    assert dict(image.env) == {"PYTHONPATH": "/app", "APP_VERSION": "v7", "NOTE": "none"}
    assert (image.workdir, image.entrypoint[0], image.cmd[0]) == ("/app", "python", "--config")


def test_unpack_maps_only_paths_of_the_image(root: Path, store: ImageStore, tmp_path: Path) -> None:
    write(
        root,
        "FROM x\nWORKDIR /app\nCOPY train.py /usr/local/bin/train\nENV PYTHONPATH=/app:/usr/lib",
        {"train.py": ""},
    )
    process = store.resolve(f"{URI}:1").unpack(
        tmp_path / "fs", args=["--out=/app/out", "gs://b/app", "/usr/local/bin/train", "/tmp/x"], env={"A": "/app"}
    )
    fs = tmp_path / "fs"
    assert process.argv == (f"--out={fs}/app/out", "gs://b/app", f"{fs}/usr/local/bin/train", "/tmp/x")
    assert dict(process.env) == {"PYTHONPATH": f"{fs}/app:/usr/lib", "A": f"{fs}/app"}
    assert process.workdir == fs / "app"


def test_volume_hides_a_directory_of_this_machine(root: Path, store: ImageStore, tmp_path: Path) -> None:
    write(root, "FROM x\nWORKDIR /app\nCOPY train.py .\nENTRYPOINT /app/train.py", {"train.py": ""})
    mount, volume, fs = f"/{tmp_path.parts[1]}", tmp_path / "volume", tmp_path / "fs"
    volume.mkdir()
    process = store.resolve(f"{URI}:1").unpack(
        fs, ["/app/train.py"], [f"{mount}/out"], {"WORK": mount}, mounts={mount: volume}
    )
    assert process.argv == (f"{fs}/app/train.py", f"{volume}/out")
    assert process.env["WORK"] == str(volume)
    assert Path(f"{fs}{mount}").resolve() == volume.resolve()


def test_command_and_args_override_as_in_kubernetes(root: Path, store: ImageStore, tmp_path: Path) -> None:
    write(root, 'FROM x\nENTRYPOINT ["python3", "-m", "a"]\nCMD ["b"]')
    image = store.resolve(URI + ":1")
    python = str(store.python)
    assert image.unpack(tmp_path / "1").argv == (python, "-m", "a", "b")
    assert image.unpack(tmp_path / "2", args=["c"]).argv == (python, "-m", "a", "c")
    assert image.unpack(tmp_path / "3", command=["/bin/true"]).argv == ("/bin/true",)


def test_shell_form_and_inherited_stage(root: Path, store: ImageStore) -> None:
    write(
        root,
        "FROM x AS base\nWORKDIR /srv/a\nCOPY a.py .\nENV A=1\nFROM base AS final\nENV B=$A-2\n"
        "ENTRYPOINT exec python a.py",
        {"a.py": ""},
    )
    image = store.resolve(URI + ":1")
    assert image.entrypoint == ("/bin/sh", "-c", "exec python a.py")
    assert dict(image.env) == {"A": "1", "B": "1-2"}
    assert (image.rootfs / "srv/a/a.py").is_file()


def test_copy_from_a_stage_skips_files_that_run_creates(root: Path, store: ImageStore) -> None:
    dockerfile = write(
        root,
        "FROM x AS b\nCOPY src /w/src\nFROM x\nCOPY --from=b /w/src /app\nCOPY --from=b /install /usr/local\n"
        "COPY --from=ghcr.io/astral-sh/uv:1 /uv /bin/",
        {"src/m.py": ""},
    )
    stage = evaluate(dockerfile, root)
    assert list(stage.files) == ["/app/m.py"]
    assert len(stage.notes) == 2


def test_digest_changes_with_content_and_only_then(root: Path, store: ImageStore) -> None:
    write(root, 'FROM x\nCOPY a.py /app/\nCMD ["python"]', {"a.py": "1", "other.py": "1"})
    first = store.resolve(URI + ":t")
    (root / "other.py").write_text("2")
    assert store.resolve(f"{URI}@{first.digest}").rootfs == first.rootfs
    (root / "a.py").write_text("changed")
    second = store.resolve(URI + ":t")
    assert second.digest != first.digest
    assert second.rootfs.joinpath("app/a.py").read_text() == "changed"
    with pytest.raises(ImageNotFound, match="is sha256:"):
        store.resolve(f"{URI}@{first.digest}")
    assert store.resolve(f"{URI}:t@{first.digest}").digest == second.digest


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("gcr.io/p/nothing:1", "no containers/nothing/Dockerfile"),
        ("gcr.io/p/UPPER:1", "not an image reference"),
        ("../../etc", "not an image reference"),
        ("", "not an image reference"),
    ],
)
def test_unknown_image_is_refused(root: Path, store: ImageStore, uri: str, reason: str) -> None:
    with pytest.raises(ImageNotFound, match=reason):
        store.resolve(uri)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM x\nCOPY missing.py /app/", r"Dockerfile:2: COPY source 'missing.py' is not in"),
        ("FROM x\nCOPY ../x /app/", "outside of the build context"),
        ("FROM x\nADD https://example.com/a /a", "not imitated"),
        ("FROM x\nFRMO y", "FRMO is not known"),
        ("COPY a b", "before the first FROM"),
        ("# nothing", "has no FROM"),
        ("FROM x\nCOPY secret.py /app/", "secret.py"),
    ],
)
def test_a_dockerfile_that_docker_refuses_is_refused(root: Path, text: str, reason: str) -> None:
    dockerfile = write(root, text, {"secret.py": ""})
    (root / ".dockerignore").write_text("**/secret.py\n")
    with pytest.raises(UnsupportedDockerfile, match=reason):
        evaluate(dockerfile, root)


def test_dockerignore_hides_files_of_a_copied_directory(root: Path) -> None:
    dockerfile = write(root, "FROM x\nCOPY src /app", {"src/a.py": "", "src/b.py": "", "src/data/c": ""})
    (root / ".dockerignore").write_text("# comment\nsrc/data\n*.py\n!src/a.py\n")
    assert list(evaluate(dockerfile, root).files) == ["/app/a.py"]


def test_continuation_and_flags_are_parsed() -> None:
    instructions = parse("FROM \\\n  x\ncopy --from=a --link \\\n# note\n b c\n")
    assert [(item.keyword, dict(item.flags), item.text.split()) for item in instructions] == [
        ("FROM", {}, ["x"]),
        ("COPY", {"from": "a", "link": ""}, ["b", "c"]),
    ]


def test_python_of_a_container_has_the_packages_but_not_this_repository(store: ImageStore, tmp_path: Path) -> None:
    """An editable install must not hide a missing COPY."""
    code = (
        "import importlib.util as u, aiohttp, sys; print(u.find_spec('dropforge'), u.find_spec('dropforge_local'))"
        "; print(sys.executable)"
    )
    done = subprocess.run([store.python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={}, check=True)
    assert done.stdout.splitlines() == ["None None", str(store.python)]
    assert os.access(store.search_path[-1], os.R_OK)


def test_label_maps_environments_of_the_image_to_local_environments(
    root: Path, store: ImageStore, tmp_path: Path
) -> None:
    write(
        root,
        """FROM python:3.12
RUN python -m venv /opt/other && python -m venv /opt/torch
LABEL dev.dropforge.environments="/opt/other=other /opt/torch=venv"
ENV TORCH=/opt/torch/bin/python
ENTRYPOINT ["/opt/other/bin/python"]
""",
    )
    with pytest.raises(ImageNotFound, match=r"build/other is not there; run `make other`"):
        store.resolve(URI)
    subprocess.run([sys.executable, "-P", "-m", "venv", "--without-pip", str(root / "build" / "other")], check=True)
    packages = next((root / "build" / "other" / "lib").glob("python3*/site-packages"))
    (packages / "only_there.py").write_text("")
    process = store.resolve(URI).unpack(tmp_path / "rootfs")
    python, torch_python = process.argv[0], process.env["TORCH"]
    assert subprocess.run([python, "-c", "import only_there"]).returncode == 0
    assert subprocess.run([torch_python, "-c", "import pytest"]).returncode == 0
    assert subprocess.run([torch_python, "-c", "import only_there"], stderr=subprocess.DEVNULL).returncode == 1


def test_an_environment_stands_for_the_base_of_an_image_where_the_stack_asks_for_it(
    root: Path, store: ImageStore, tmp_path: Path
) -> None:
    write(root, 'FROM x\nLABEL dev.dropforge.base="engine"\nENTRYPOINT ["engine"]\n')
    assert store.resolve(URI).unpack(tmp_path / "without").search_path == ()
    asked = ImageStore(root, tmp_path / "images", Path(sys.executable), ["engine", "another"])
    with pytest.raises(ImageNotFound, match=r"build/engine is not there; run `make engine`"):
        asked.resolve(URI)
    programs = root / "build" / "engine" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").touch()
    assert asked.resolve(URI).unpack(tmp_path / "with").search_path == (programs.resolve(),)
