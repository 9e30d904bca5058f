"""The serving container: an OpenAI-compatible endpoint for the committed model of one run, or for many adapters.

    DROPFORGE_MODEL_URI=gs://b/models/demo-0123456789ab DROPFORGE_SERVED_MODEL_NAME=demo PORT=8000 \\
    python -m containers.serve_vllm.serve

DROPFORGE_ADAPTERS names adapters of other runs (adapters.py). On a GPU or TPU this process becomes `vllm serve`, and
what it compiles is kept for the next start (compiled.py). On a GPU, vLLM reads the weights with the token of the run,
from another process (bucket_tokens.py). On a CPU, this process starts an engine on an inner port behind the gate
(gate.py).
Exit codes: 64 for wrong settings and for a model that the image cannot serve, 66 if no model is committed, 70 if the
engine fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dropforge.base.errors import DropforgeError
from dropforge.base.log import log
from dropforge.base.names import parse_gs_uri
from dropforge.cloud.clients import Clients
from dropforge.cloud.container_secrets import load_secrets
from dropforge.cloud.run_access import REQUEST_VARIABLE as ACCESS
from dropforge.run import artifacts
from dropforge.run.artifacts import Manifest
from dropforge.run.proof import VARIABLE as RUN_KEY

from . import compiled
from .adapters import VARIABLE as ADAPTERS
from .adapters import Loaded
from .adapters import download as download_each
from .bucket_tokens import lend
from .children import die_with_parent
from .engine import (
    NO_PARSERS,
    BadSettings,
    EngineName,
    Parsers,
    Settings,
    choose,
    choose_parsers,
    compile_arguments,
    engine_environment,
    has_gpu,
    has_tpu,
    transformers_argv,
    vllm_argv,
    vllm_cpu_argv,
    vllm_python,
    vllm_tpu_argv,
    vllm_tpu_environment,
    without_sampling,
)
from .known import unknown_model

if TYPE_CHECKING:  # the images of accelerators have no aiohttp
    from .gate import Gate

BAD_CONFIG = 64
NOT_FOUND = 66
ENGINE_FAILED = 70
KEY = "VLLM_API_KEY"
STOP_SECONDS = 1.5  # from SIGTERM to SIGKILL; vLLM's processes take 1.3 s to end


def main() -> int:
    """Serve until SIGTERM. The environment is the only input."""
    began = time.monotonic()
    try:
        settings = Settings.from_environment()
        engine = choose(settings.engine, gpu=has_gpu(), tpu=has_tpu(), vllm=vllm_python() is not None)
    except BadSettings as error:
        log(str(error), stage="serve", severity="ERROR")
        return BAD_CONFIG
    try:
        return serve(settings, engine, began)
    except DropforgeError as error:
        log(str(error), stage="serve", severity="ERROR")
        return NOT_FOUND


def serve(settings: Settings, engine: EngineName, began: float) -> int:
    """Become the engine, or run it behind the gate; returns the exit code. Raises DropforgeError without a model."""
    start = compiled.Start(began)
    run_key = os.environ.pop(RUN_KEY, "")
    clients = Clients(dict(os.environ))
    for name in (ACCESS, ADAPTERS):  # the engine, which runs the model's code, needs neither the key nor the access
        os.environ.pop(name, None)
    load_secrets(clients, os.environ)  # VLLM_API_KEY, which vLLM reads itself
    client = clients.storage()
    manifest = find_model(client, settings.model_uri, run_key)
    model = f"{settings.model_uri}/{manifest.serve_path}"
    start.done("check of the model")
    log("starting", stage="serve", model=model, engine=engine)
    if engine in ("vllm", "vllm-tpu") and (problem := unknown_model(read_config(client, model))):
        log(problem, stage="serve", severity="ERROR")
        return BAD_CONFIG
    if engine == "vllm-tpu" and settings.adapters:
        log(f"{ADAPTERS} is set, and adapters are not served on TPUs", stage="serve", severity="ERROR")
        return BAD_CONFIG
    parsers = NO_PARSERS if engine == "transformers" else find_parsers(client, model)
    if engine == "vllm":
        loaded = download_adapters(clients, settings, Path(tempfile.mkdtemp(prefix="dropforge-")))
        start.done("adapters")
        become_vllm(clients, settings, manifest.run, model, parsers, loaded, start)
    if engine == "vllm-tpu":
        become_vllm_tpu(clients, settings, manifest, model, parsers, start)
    with working_directory(settings, engine) as directory:
        download(client, settings, manifest, directory / "model")
        loaded = download_adapters(clients, settings, directory / "adapters")
        start.done("weights")
        kept = None
        if engine == "vllm-cpu" and settings.compiles_on_cpu:
            arguments = compile_arguments(settings, engine, loaded)
            where = directory / "compiled"
            kept = fetch_compiled(compiled.CODE, client, settings, manifest.run, model, arguments, where)
            start.done("compiled code")
        return asyncio.run(serve_behind_gate(settings, engine, directory, parsers, loaded, start, client, kept))


def become_vllm(
    clients: Clients,
    settings: Settings,
    run: str,
    model: str,
    parsers: Parsers,
    loaded: Sequence[Loaded],
    start: compiled.Start,
) -> NoReturn:
    """Become `vllm serve` on GPUs, beside processes that lend it the run's token and keep what it compiles."""
    command = vllm_argv(settings, model, parsers, loaded)
    environment = {name: value for name, value in clients.environment.items() if name != ADAPTERS}
    compiling: dict[str, str] = {}
    kept = None
    if settings.compile_cache:
        directory, arguments = settings.compile_cache / "compiled", compile_arguments(settings, "vllm", loaded)
        kept = fetch_compiled(compiled.CODE, clients.storage(), settings, run, model, arguments, directory)
        compiling = compiled.environment(directory)
        start.done("compiled code")
    bucket, _ = parse_gs_uri(settings.model_uri)
    compiled.watch(start, settings.own_address, bucket, run, kept, environment)
    lent = lend(environment) if clients.run_credentials() else {}
    os.execvpe(command[0], command, {**os.environ, **lent, **compiling})


def become_vllm_tpu(
    clients: Clients, settings: Settings, manifest: Manifest, model: str, parsers: Parsers, start: compiled.Start
) -> NoReturn:
    """Become `vllm serve` on TPU chips, beside a process that keeps what XLA compiles. Raises DropforgeError."""
    client, work = clients.storage(), settings.work or Path(tempfile.mkdtemp(prefix="dropforge-"))
    download(client, settings, manifest, work / "model")
    start.done("weights")
    directory, arguments = (settings.compile_cache or work) / "compiled", compile_arguments(settings, "vllm-tpu")
    kept = None
    if settings.compile_cache:
        kept = fetch_compiled(compiled.PROGRAMS, client, settings, manifest.run, model, arguments, directory)
        start.done("compiled code")
    bucket, _ = parse_gs_uri(settings.model_uri)
    compiled.watch(start, settings.own_address, bucket, manifest.run, kept, clients.environment)
    command = vllm_tpu_argv(settings, str(work / "model"), parsers)
    compiling = compiled.tpu_environment(directory)
    os.execvpe(command[0], command, {**os.environ, **vllm_tpu_environment(work), **compiling})


def fetch_compiled(
    kind: compiled.Kind,
    client: Any,
    settings: Settings,
    run: str,
    model: str,
    arguments: list[str],
    directory: Path,
) -> compiled.Kept | None:
    """Get what a server of the run has compiled before; what this start must keep, None if there is nothing to keep."""
    bucket, _ = parse_gs_uri(settings.model_uri)
    try:
        kept = compiled.kept(kind, bucket, run, directory, vllm_python(), arguments, read_config(client, model))
    except compiled.Unfit as error:
        log(f"compiled code is not kept: {error}", stage="serve", severity="WARNING")
        return None
    return None if compiled.fetch(client, kept) else kept


@contextmanager
def working_directory(settings: Settings, engine: EngineName) -> Iterator[Path]:
    """Where the model's files and the engine's are: at the same path at each start, if compiled code is kept."""
    if engine == "vllm-cpu" and settings.compiles_on_cpu and settings.compile_cache:
        settings.compile_cache.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(settings.compile_cache / "model", ignore_errors=True)
        yield settings.compile_cache
    else:
        with tempfile.TemporaryDirectory(prefix="dropforge-") as name:
            yield Path(name)


def find_model(client: Any, model_uri: str, run_key: str) -> Manifest:
    """The manifest of the model to serve, whose files are in the bucket. Raises DropforgeError if there is none."""
    bucket, prefix = parse_gs_uri(model_uri)
    manifest = artifacts.read_manifest(client, bucket, prefix.split("/")[1], run_key)
    if manifest is None:
        raise DropforgeError(
            f"{model_uri} has no {artifacts.MANIFEST}: no training run has committed a model there; "
            "expected one before an endpoint is deployed"
        )
    if problems := artifacts.verify_manifest(client, bucket, manifest):
        raise DropforgeError(f"{model_uri} differs from its manifest: {'; '.join(problems[:3])}")
    return manifest


def download(client: Any, settings: Settings, manifest: Manifest, directory: Path) -> None:
    """Download the files to serve, each compared with its digest in the manifest. Raises DropforgeError."""
    files = artifacts.files_below(manifest, manifest.serve_path)
    artifacts.download_files(client, f"{settings.model_uri}/{manifest.serve_path}", directory, files)


def download_adapters(clients: Clients, settings: Settings, directory: Path) -> list[Loaded]:
    """Download the adapters that requests select by name. Raises DropforgeError for one that cannot be served."""
    bucket, _ = parse_gs_uri(settings.model_uri)
    loaded = download_each(clients, bucket, settings.adapters, directory)
    if loaded:
        log("downloaded the adapters", stage="serve", adapters=[adapter.name for adapter in loaded])
    return loaded


def read_config(client: Any, model: str) -> dict[str, Any]:
    """The model's config.json; {} if it has none."""
    bucket, prefix = parse_gs_uri(model)
    blob = client.bucket(bucket).blob(f"{prefix}/config.json")
    config: dict[str, Any] = json.loads(blob.download_as_text()) if blob.exists() else {}
    return config


def find_parsers(client: Any, model: str) -> Parsers:
    """The parsers of the model's thoughts and calls of tools, from the committed files."""
    bucket, prefix = parse_gs_uri(model)
    blob = client.bucket(bucket).blob(f"{prefix}/chat_template.jinja")
    template = blob.download_as_text() if blob.exists() else ""
    return choose_parsers(read_config(client, model).get("model_type", ""), template)


async def serve_behind_gate(
    settings: Settings,
    engine: EngineName,
    directory: Path,
    parsers: Parsers,
    loaded: Sequence[Loaded],
    starting: compiled.Start,
    client: Any = None,
    kept: compiled.Kept | None = None,
) -> int:
    """Run the engine and the gate until SIGTERM, or until the engine ends; returns the exit code.

    `kept` is where the compiled code goes once the engine is ready; None: nowhere. Whatever stops the start (a file of
    the model, the port, the engine's program) is logged.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as ending:
            gate, process = await start(settings, engine, directory, parsers, loaded, ending)
            return await watch(gate, process, stop, starting, settings, client, kept)
    except Exception as error:  # noqa: BLE001  (any error ends the container)
        log(f"the endpoint failed: {type(error).__name__}: {error}", stage="serve", severity="ERROR")
        return ENGINE_FAILED


async def start(
    settings: Settings,
    engine: EngineName,
    directory: Path,
    parsers: Parsers,
    loaded: Sequence[Loaded],
    ending: AsyncExitStack,
) -> tuple[Gate, subprocess.Popen[bytes]]:
    """Start the engine and the gate. `ending` stops first the gate, whose unfinished answers need the engine."""
    from aiohttp import web

    from .prompt import describe_answers

    model, port = str(directory / "model"), free_port()
    if engine == "transformers":
        describe_answers(directory / "model")
        if settings.sampling == "greedy":
            answer_greedily(directory / "model")
    process = start_engine(settings, engine, model, port, directory, parsers, loaded)
    ending.callback(end, process)
    gate = make_gate(settings, engine, directory / "model", port, loaded)
    runner = gate.runner(shutdown_timeout=settings.drain_seconds or 0.2)
    ending.push_async_callback(runner.cleanup)
    await runner.setup()
    await web.TCPSite(runner, settings.host, settings.port).start()
    return gate, process


def make_gate(settings: Settings, engine: EngineName, model: Path, port: int, loaded: Sequence[Loaded]) -> Gate:
    """The gate in front of the engine at a port of this machine."""
    from .gate import Gate
    from .prompt import PromptCounter
    from .standin_gate import StandinGate

    upstream, name, key = f"http://127.0.0.1:{port}", settings.served_name, os.environ.get(KEY, "")
    ends_connections = bool(settings.drain_seconds)
    if engine != "transformers":
        return Gate(upstream, name, key, ends_connections)
    return StandinGate(
        upstream,
        name,
        key=key,
        ends_connections=ends_connections,
        model=str(model),
        adapters=[adapter.name for adapter in loaded],
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        count_tokens=PromptCounter(model, settings.max_model_len).count,
    )


def answer_greedily(directory: Path) -> None:
    """Remove the sampling defaults from a downloaded model."""
    path = directory / "generation_config.json"
    if path.is_file():
        path.write_text(json.dumps(without_sampling(json.loads(path.read_text()))))


async def watch(
    gate: Gate,
    process: subprocess.Popen[bytes],
    stop: asyncio.Event,
    starting: compiled.Start,
    settings: Settings,
    client: Any,
    kept: compiled.Kept | None,
) -> int:
    """Returns 0 when `stop` is set, ENGINE_FAILED when the engine ends or its first completion fails."""
    probe = asyncio.create_task(gate.probe())
    stopped = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(asyncio.to_thread(process.wait))
    waiting: set[asyncio.Task[Any]] = {probe, stopped, ended}
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                return 0
            if ended in done:
                log(f"the engine ended with {process.returncode}", stage="serve", severity="ERROR")
                return ENGINE_FAILED
            if error := probe.exception():
                log(f"the engine does not work: {error}", stage="serve", severity="ERROR")
                return ENGINE_FAILED
            # A daemon, because the end of this process does not wait for the bucket.
            Thread(target=tell_start, args=(settings, starting, client, kept), daemon=True).start()
    finally:
        for task in waiting:
            task.cancel()


def tell_start(settings: Settings, starting: compiled.Start, client: Any, kept: compiled.Kept | None) -> None:
    """Tell the parts of the start, then keep what the engine has compiled."""
    bucket, prefix = parse_gs_uri(settings.model_uri)
    starting.ready(client, bucket, prefix.split("/")[1])
    if kept:
        compiled.keep(client, kept)


def start_engine(
    settings: Settings,
    engine: EngineName,
    model: str,
    port: int,
    directory: Path,
    parsers: Parsers,
    loaded: Sequence[Loaded],
) -> subprocess.Popen[bytes]:
    """Start the engine in a process group, for vLLM's further processes. The kernel kills it with this process."""
    if engine == "transformers":
        command = transformers_argv(model, port, loaded)
    else:
        python = vllm_python()
        assert python is not None, "`choose` names an engine that is installed"
        command = vllm_cpu_argv(python, settings, model, port, parsers, loaded)
    compiles = engine == "vllm-cpu" and settings.compiles_on_cpu
    environment = {**os.environ, **engine_environment(directory, compiles=compiles)}
    environment.pop(KEY, None)  # the gate checks it
    return subprocess.Popen(command, env=environment, process_group=0, preexec_fn=die_with_parent())


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the engine, then SIGKILL to the rest of its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
