"""The next server of a run gets the code that a server has compiled, and no archive stops a start."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest
from tests.patience import PATIENCE_SECONDS

from bench import cold_start
from containers.serve_vllm import compiled
from containers.serve_vllm.adapters import Loaded
from containers.serve_vllm.compiled import CODE, PROGRAMS, Kept, Kind, Start, Unfit, fetch, keep, pack, unpack
from containers.serve_vllm.engine import Settings, compile_arguments, engine_environment, vllm_cpu_argv
from dropforge.base import names
from dropforge.run.starts import PARTS, read_start
from dropforge_local.base.ports import free_port
from dropforge_local.emulators.tpu.metadata import MetadataServer

from ..conftest import RUNS
from ..quick import VLLM, Zygote

ROOT = Path(__file__).resolve().parents[3]
RUN = "job-0123456789ab"
FILE = "vllm/torch_compile_cache/a/b.so"
PROGRAM = "xla/jit_step-0a-cache"
FILES = {CODE: [FILE, "triton/k/kernel.cubin"], PROGRAMS: [PROGRAM, "xla/jit_sample-0b-cache"]}
ENVIRONMENT = {"DROPFORGE_MODEL_URI": f"gs://{RUNS}/models/{RUN}", "DROPFORGE_SERVED_MODEL_NAME": "m"}


def zipped(files: dict[str, bytes], **about: Any) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = about.get("attributes", 0)
            archive.writestr(entry, content)
    return file


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(params=[CODE, PROGRAMS], ids=lambda kind: kind.name)
def kept(tmp_path: Path, request: pytest.FixtureRequest) -> Kept:
    return Kept(RUNS, f"caches/{RUN}/{request.node.name[-200:]}.zip", tmp_path / "cache", request.param)


def elsewhere(kept: Kept) -> Kept:
    """The same archive, for another machine."""
    return replace(kept, directory=kept.directory.with_name("elsewhere"))


def write(directory: Path, name: str, content: bytes = b"code") -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_the_next_server_gets_the_compiled_code_and_nothing_else(cloud: Any, kept: Kept, tmp_path: Path) -> None:
    client, (first, second) = cloud.client, FILES[kept.kind]
    assert not fetch(client, kept)
    assert not keep(client, kept), "there is nothing to keep yet"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in (first, second, "vllm/assets/tokenizer.json", "hf/token"):
        write(kept.directory, name, name.encode())
    (kept.directory / first).with_name("link.so").symlink_to(secret)
    assert keep(client, kept)
    assert fetch(client, elsewhere(kept))
    assert files_below(elsewhere(kept).directory) == {first: first.encode(), second: second.encode()}


def test_the_first_archive_stays(cloud: Any, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    client, (file, _) = cloud.client, FILES[kept.kind]
    write(kept.directory, file, b"first")
    assert keep(client, kept)
    write(kept.directory, file, b"second")
    assert not keep(client, kept)
    assert fetch(client, elsewhere(kept))
    assert files_below(elsewhere(kept).directory) == {file: b"first"}
    assert "WARNING" not in capsys.readouterr().err, "two instances that start at once are no fault"


def test_of_two_instances_that_end_their_start_at_once_the_first_has_the_archive(
    cloud: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other instance creates the archive while this one packs."""
    file, _ = FILES[kept.kind]
    write(kept.directory, file, b"second")

    def pack_slowly(*arguments: Any) -> int:
        cloud.client.bucket(RUNS).blob(kept.name).upload_from_string(zipped({file: b"first"}).getvalue())
        return pack(*arguments)

    monkeypatch.setattr(compiled, "pack", pack_slowly)
    assert not keep(cloud.client, kept)
    assert "WARNING" not in capsys.readouterr().err
    assert fetch(cloud.client, elsewhere(kept))
    assert files_below(elsewhere(kept).directory) == {file: b"first"}


def test_what_a_tpu_vm_has_compiled_itself_stays_and_is_not_downloaded(
    cloud: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(RUNS, f"caches/{RUN}/own.zip", tmp_path / "cache", PROGRAMS)
    write(elsewhere(kept).directory, PROGRAM, b"of another machine")
    assert keep(cloud.client, elsewhere(kept))
    write(kept.directory, PROGRAM, b"own")
    assert not fetch(None, kept), "it needs no client"
    assert files_below(kept.directory) == {PROGRAM: b"own"}
    assert "uses the compiled code on the disk of this machine" in capsys.readouterr().err
    assert not keep(cloud.client, kept)
    assert "WARNING" not in capsys.readouterr().err


def test_a_tpu_vm_whose_container_ended_early_keeps_its_programs_after_the_restart(cloud: Any, tmp_path: Path) -> None:
    kept = Kept(RUNS, f"caches/{RUN}/early.zip", tmp_path / "cache", PROGRAMS)
    write(kept.directory, PROGRAM, b"own")
    assert not fetch(cloud.client, kept)
    assert keep(cloud.client, kept)
    assert fetch(cloud.client, elsewhere(kept))


def test_a_container_that_is_killed_while_it_unpacks_leaves_no_half_of_an_archive(cloud: Any, kept: Kept) -> None:
    """On the disk of a TPU VM, the next container would take the half for its own programs."""
    first, second = FILES[kept.kind]
    write(kept.directory, first, b"whole")
    assert keep(cloud.client, kept)
    shutil.rmtree(kept.directory)
    write(kept.directory.with_name("cache.part"), second, b"cut o")
    assert fetch(cloud.client, kept)
    assert files_below(kept.directory) == {first: b"whole"}
    assert [path.name for path in kept.directory.parent.iterdir()] == ["cache"]


OUTSIDE = [
    *((CODE, f"vllm/torch_compile_cache{end}") for end in ("", "/../../../x")),
    *((CODE, name) for name in ("../x", "/etc/x", "vllm/assets/x", "x", PROGRAM)),
    *((PROGRAMS, name) for name in ("../x", "/etc/x", "xla", "xla/../../model/config.json", "model/config.json", FILE)),
]


@pytest.mark.parametrize(("kind", "name"), OUTSIDE, ids=str)
def test_no_archive_writes_outside(kind: Kind, name: str, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "cache"
    directory.mkdir(parents=True)
    with pytest.raises(Unfit, match="expected a path below"):
        unpack(zipped({name: b"evil"}), directory, kind)
    assert files_below(tmp_path) == {}


def test_a_link_in_an_archive_is_a_file(tmp_path: Path) -> None:
    """A second entry would be written through a link, to where the first points."""
    link = zipped({"triton/a": b"/etc"}, attributes=0o120777 << 16)
    unpack(link, tmp_path, CODE)
    assert not (tmp_path / "triton/a").is_symlink()
    assert (tmp_path / "triton/a").read_bytes() == b"/etc"
    with pytest.raises(OSError, match="triton"):
        unpack(zipped({"triton/a/passwd": b"evil"}), tmp_path, CODE)


def test_an_archive_never_unpacks_to_more_than_its_limit(tmp_path: Path) -> None:
    bomb = zipped({f"triton/{number}": bytes(1 << 19) for number in range(8)})
    with pytest.raises(Unfit, match="more than"):
        unpack(bomb, tmp_path, replace(CODE, most_bytes=1 << 20))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1 << 20
    three = zipped(dict.fromkeys(("triton/x", "triton/y", "triton/z"), b""))
    with pytest.raises(Unfit, match="3 files"):
        unpack(three, tmp_path / "other", replace(CODE, most_files=2))


@pytest.mark.parametrize("content", [b"", b"no archive", zipped({FILE: b"x" * 999}).getvalue()[:-40]])
def test_a_broken_archive_stops_no_start(
    content: bytes, cloud: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(RUNS, f"caches/{RUN}/broken-{len(content)}.zip", tmp_path / "cache")
    cloud.client.bucket(RUNS).blob(kept.name).upload_from_string(content)
    write(kept.directory, FILE, b"of an earlier start")
    assert not fetch(cloud.client, kept)
    assert kept.directory.is_dir()
    assert files_below(kept.directory) == {}
    assert "is not used" in capsys.readouterr().err


def test_an_archive_that_is_evil_in_its_last_entry_leaves_nothing(cloud: Any, kept: Kept) -> None:
    evil = zipped({FILES[kept.kind][0]: b"x", "../outside": b"x"}).getvalue()
    cloud.client.bucket(RUNS).blob(kept.name).upload_from_string(evil)
    assert not fetch(cloud.client, kept)
    assert files_below(kept.directory.parent) == {}


def test_a_bucket_that_refuses_stops_no_start(cloud: Any, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    missing = replace(kept, bucket="no-such-bucket")
    write(kept.directory, FILES[kept.kind][0])
    assert not keep(cloud.client, missing)
    assert "the compiled code is not kept: " in capsys.readouterr().err
    assert not fetch(cloud.client, elsewhere(missing))


def test_a_disk_that_cannot_be_written_stops_no_start(cloud: Any, kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not fetch(cloud.client, replace(kept, directory=tmp_path / "file" / "cache"))


def test_too_much_is_not_kept(cloud: Any, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    write(kept.directory, FILES[kept.kind][0], os.urandom(4096))
    limits: list[dict[str, Any]] = [{"most_bytes": 4095}, {"most_archive_bytes": 4000}, {"most_files": 0}]
    for limit in limits:
        assert not keep(cloud.client, replace(kept, kind=replace(kept.kind, **limit)))
        assert "is not kept: Unfit: " in capsys.readouterr().err
    assert not cloud.client.bucket(RUNS).blob(kept.name).exists()
    assert keep(cloud.client, kept)
    smaller = replace(elsewhere(kept), kind=replace(kept.kind, most_archive_bytes=4000))
    assert not fetch(cloud.client, smaller), "it is larger than what this version takes"
    assert files_below(smaller.directory) == {}


def test_an_archive_does_not_fill_the_disk_of_a_server(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a TPU VM the programs are beside the weights, on a disk that a large model almost fills."""
    kept = Kept(RUNS, f"caches/{RUN}/full.zip", tmp_path / "cache", PROGRAMS)
    write(kept.directory, PROGRAM, bytes(4096))
    for free, is_kept in ((8191, False), (8192, True)):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, free=free: Mock(free=free))
            assert keep(cloud.client, kept) is is_kept
        assert ("is not kept: Unfit: the disk of this machine has" in capsys.readouterr().err) is not is_kept


def test_compiled_code_is_for_one_machine_and_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "python3.12" / "dist-packages"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    (packages / "torchvision-0.1.dist-info").mkdir()
    python = str(tmp_path / "bin" / "python3")
    config: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64}
    monkeypatch.setattr(compiled, "gpus", lambda: ["NVIDIA L4, 8.9, 550.1"])
    monkeypatch.setattr(compiled, "cpu", lambda: "avx2")

    def name(directory: Path = Path("/c"), arguments: tuple[str, ...] = ("vllm",), run: str = RUN) -> str:
        return compiled.kept(CODE, RUNS, run, directory, python, list(arguments), config).name

    first = name()
    assert name() == first
    assert first.startswith(f"caches/{RUN}/")
    others = {name(Path("/d")), name(arguments=("vllm", "8")), name(run="job-fedcba987654")}
    config["hidden_size"] = 65
    others.add(name())
    config["hidden_size"] = 64
    for changed, value in (("gpus", ["NVIDIA L4, 8.9, 550.2"]), ("cpu", "avx2 avx512f")):
        with monkeypatch.context() as patch:
            patch.setattr(compiled, changed, lambda value=value: value)
            others.add(name())
    with monkeypatch.context() as patch:
        patch.setenv(compiled.IMAGE_VARIABLE, "serve@sha256:1")
        others.add(name())
    (packages / "torchvision-0.1.dist-info").rename(packages / "torchvision-0.2.dist-info")
    assert name() == first, "it compiles nothing"
    (packages / "torch-2.13.0.dist-info").rename(packages / "torch-2.14.0.dist-info")
    others.add(name())
    assert len(others) == 8
    assert first not in others


@contextmanager
def metadata_server(tree: dict[str, Any]) -> Iterator[str]:
    """The address of the metadata server of an emulated machine. The tree may change."""
    port = free_port(range(20_000, 24_000), set())
    loop, server = asyncio.new_event_loop(), MetadataServer(port, lambda: tree)
    thread = Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE_SECONDS)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_programs_are_for_one_type_of_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "libtpu-0.0.48.dist-info").mkdir(parents=True)
    attributes = {"accelerator-type": "v5litepod-8"}

    def name() -> str:
        python, config = str(tmp_path / "bin" / "python"), {"model_type": "qwen3"}
        return compiled.kept(PROGRAMS, RUNS, RUN, Path("/work/compiled"), python, ["vllm-tpu"], config).name

    with metadata_server({"instance": {"attributes": attributes}}) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        first = name()
        assert name() == first
        attributes["accelerator-type"] = "v6e-8"
        others = {name()}
        attributes["accelerator-type"] = "v5litepod-8"
        (packages / "libtpu-0.0.48.dist-info").rename(packages / "libtpu-0.0.49.dist-info")
        others.add(name())
        assert len(others - {first}) == 2
        for attributes["accelerator-type"] in ("", " "):
            with pytest.raises(Unfit, match="empty type"):
                name()
        del attributes["accelerator-type"]
        with pytest.raises(Unfit, match="does not tell the type of the TPU: HTTPError"):
            name()
    with pytest.raises(Unfit, match="does not tell the type of the TPU: URLError"):
        name()


def test_an_unknown_gpu_has_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own key is equal for two generations of GPUs, and a program for the other one would end the engine."""
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.setattr(compiled, "_NVIDIA_SMI", (str(tmp_path / "nvidia-smi"),))
    with pytest.raises(Unfit, match="no nvidia-smi"):
        compiled.gpus()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L4, 8.9, 550.1'\necho 'NVIDIA L4, 8.9, 550.1'\n")
    program.chmod(0o755)
    assert compiled.gpus() == ["NVIDIA L4, 8.9, 550.1"] * 2
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(Unfit, match="CalledProcessError"):
        compiled.gpus()


def test_the_arguments_that_count_have_no_path_of_this_start(tmp_path: Path) -> None:
    settings = Settings.from_environment(ENVIRONMENT)
    loaded = [[Loaded(name="a", directory=tmp_path / start, rank=8)] for start in ("x", "y")]
    assert compile_arguments(settings, "vllm", loaded[0]) == compile_arguments(settings, "vllm", loaded[1])
    higher = [Loaded(name="a", directory=tmp_path, rank=64)]
    assert compile_arguments(settings, "vllm", higher) != compile_arguments(settings, "vllm", loaded[0])
    assert compile_arguments(settings, "vllm", loaded[0]) != compile_arguments(settings, "vllm")


def test_the_cpu_build_compiles_only_if_it_is_told(tmp_path: Path) -> None:
    told = {**ENVIRONMENT, "DROPFORGE_COMPILE_CACHE": str(tmp_path), "DROPFORGE_CPU_COMPILE": "1"}
    for name in ("", *compiled.environment(tmp_path), "DROPFORGE_COMPILE_CACHE", "DROPFORGE_CPU_COMPILE"):
        settings = Settings.from_environment({key: value for key, value in told.items() if key != name})
        compiles = name not in ("DROPFORGE_COMPILE_CACHE", "DROPFORGE_CPU_COMPILE")
        assert ("--enforce-eager" not in vllm_cpu_argv("python", settings, "/m", 9000)) == compiles
        assert (
            "TORCH_COMPILE_DISABLE" not in engine_environment(tmp_path, compiles=settings.compiles_on_cpu)
        ) == compiles


class Health(ThreadingHTTPServer):
    """A server whose /health answers 503 until `ready` is set. `asked` is set by the first request."""

    def __init__(self) -> None:
        self.ready, self.asked = Event(), Event()
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Health

    def do_GET(self) -> None:
        status = 200 if self.server.ready.is_set() and self.path == "/health" else 503
        self.send_response(status)
        self.end_headers()
        self.server.asked.set()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def health() -> Iterator[Health]:
    with Health() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_vllm_compiles_is_kept_once_it_answers(cloud: Any, kept: Kept, health: Health) -> None:
    """The process beside vLLM; this test is vLLM."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "containers.serve_vllm.compiled",
        Start(0.0).to_json(),
        f"127.0.0.1:{health.server_port}",
    ]
    process = subprocess.Popen(
        [*command, kept.bucket, RUN, kept.kind.name, kept.name, str(kept.directory)],
        env={**os.environ, **cloud.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    blob = cloud.client.bucket(RUNS).blob(kept.name)
    write(kept.directory, FILES[kept.kind][0])
    assert health.asked.wait(PATIENCE_SECONDS)
    assert process.poll() is None
    assert not blob.exists(), "it waits until vLLM answers"
    health.ready.set()
    _, output = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert fetch(cloud.client, elsewhere(kept))
    assert read_start(cloud.client, RUNS, RUN).keys() == {"program", "engine"}
    assert "kept the compiled code" in output


def test_each_part_of_a_start_is_told(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    start, run = Start(0.0), "parts-0123456789ab"
    for part in PARTS[1:-1]:
        start.done(part)
    Start.from_json(start.to_json()).ready(cloud.client, RUNS, run)
    assert list(read_start(cloud.client, RUNS, run)) == list(PARTS)
    capsys.readouterr()
    start.ready(cloud.client, "no-such-bucket", run)
    assert "the parts of the start are not in the record: NotFound" in capsys.readouterr().err


FORGED = ["", "[]", "{", '{"engine": "1"}', '{"engine": -1}', '{"engine": true}', '{"engine": NaN}', '{"engine": 1e9}']


@pytest.mark.parametrize("text", [*FORGED, '{"rm -rf": 1}', "[" * 3000, "1" * 5000, '{"engine": Infinity}'])
def test_forged_figures_are_none(text: str, cloud: Any) -> None:
    run = "forged-0123456789ab"
    cloud.client.bucket(RUNS).blob(names.server_object(run, "start.json")).upload_from_string(text)
    assert read_start(cloud.client, RUNS, run) == {}


def test_a_packed_directory_without_code_is_no_archive(tmp_path: Path) -> None:
    write(tmp_path, "vllm/assets/config.json")
    assert pack(tmp_path, io.BytesIO(), CODE) == 0


def with_one_layer(base: Path, directory: Path) -> Path:
    """The first layer of a model as a model in a directory: the compiler gets less to do."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, directory)
    config = json.loads((base / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory


def noting_compiler(directory: Path, notes: Path) -> Path:
    """A directory with a compiler that writes its arguments to a file: a line for each of its calls."""
    directory.mkdir()
    program = directory / "g++"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {shutil.which("g++")} "$@"\n')
    program.chmod(0o755)
    return directory


def libraries_in(notes: Path) -> int:
    """How many libraries the compiler was to make; it also runs to read a header."""
    return sum("-shared" in line.split() for line in notes.read_text().splitlines())


@contextmanager
def forking_vllm(environment: Mapping[str, str], vllm: Path, cache: Path) -> Iterator[dict[str, str]]:
    """The environment of servers whose vLLM is forked (quick.py): its imports would take as long as the rest.

    test_serve.py starts vLLM with its imports.
    """
    with tempfile.TemporaryDirectory(prefix="df-") as short:
        own = {**environment, **engine_environment(cache, compiles=True)}
        zygote = Zygote(vllm / "bin" / "python", Path(short) / "zygote", own, VLLM)
        try:
            yield zygote.given(environment)
        finally:
            zygote.end()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_compiles_nothing_that_the_server_before_has_compiled(
    cloud: Any, vllm_environment: Path, base_model: Path, tmp_path: Path
) -> None:
    run, cache, notes = "compiles-0123456789ab", tmp_path / "cache", tmp_path / "notes"
    cold_start.commit(cloud.client, RUNS, run, with_one_layer(base_model, tmp_path / "model"))
    environment = {
        **cloud.environment(),
        "PATH": f"{noting_compiler(tmp_path / 'bin', notes)}:{vllm_environment / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "DROPFORGE_MODEL_URI": f"gs://{RUNS}/models/{run}",
        "DROPFORGE_SERVED_MODEL_NAME": "m",
        "DROPFORGE_MAX_MODEL_LEN": "128",
        "DROPFORGE_MAX_NUM_SEQS": "2",
        "DROPFORGE_COMPILE_CACHE": str(cache),
        "DROPFORGE_CPU_COMPILE": "1",
        # PyTorch would compile and run a program for each set of vector instructions that this processor has: 8 s.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "HOST": "127.0.0.1",
        "PORT": str(free_port(range(20_000, 24_000), set())),
    }
    with forking_vllm(environment, vllm_environment, cache) as environment:
        first = cold_start.start(environment, cold_start.KEPT)
        (archive,) = cloud.client.list_blobs(RUNS, prefix=f"caches/{run}/")
        with zipfile.ZipFile(io.BytesIO(archive.download_as_bytes())) as entries:
            libraries = {name for name in entries.namelist() if name.endswith(".so")}
        assert libraries, "Inductor compiles C++ to libraries"
        assert libraries_in(notes) == len(libraries)
        shutil.rmtree(cache)
        cold_start.start(environment, cold_start.READY)
    assert libraries_in(notes) == len(libraries), "the second server compiles nothing"
    assert {name for name in files_below(cache / "compiled") if name.endswith(".so")} == libraries
    assert [blob.generation for blob in cloud.client.list_blobs(RUNS, prefix="caches/")].count(archive.generation) == 1
    assert read_start(cloud.client, RUNS, run).keys() == first["parts"].keys()
