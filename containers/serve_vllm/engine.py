"""Chooses the serving engine and builds its command line, in pure functions: tests read the commands."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .adapters import VARIABLE as ADAPTERS
from .adapters import Adapter, Loaded, parse, vllm_flags
from .compiled import VARIABLE as COMPILE_CACHE
from .compiled import environment as compile_environment

EngineName = Literal["vllm", "vllm-tpu", "vllm-cpu", "transformers"]
ENGINES = ("auto", "vllm", "transformers")
SAMPLING = ("greedy", "base_model")
# vLLM's defaults for requests that give no sampling parameters. `vllm`: those of generation_config.json are ignored,
# but for the tokens that end an answer (vllm/config/model.py). `auto`: the file's.
GREEDY = ("--generation-config", "vllm", "--override-generation-config", '{"temperature": 0.0}')
BASE_MODEL = ("--generation-config", "auto")
# A request cannot make the server fetch an image from the network, or from the metadata server. An empty list would
# allow every domain (vllm/multimodal/media/connector.py), so the only one is a name that never exists (RFC 2606).
NO_MEDIA = ("--allowed-media-domains", "none.invalid")
SAMPLING_FIELDS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
# vLLM's parser that takes the thoughts out of an answer, by the model's type
# (https://docs.vllm.ai/en/latest/features/reasoning_outputs/).
REASONING_PARSERS = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
# vLLM's parser that takes calls of tools out of an answer: the types of models, what their chat template has if it
# writes calls in this form, and the parser (https://docs.vllm.ai/en/latest/features/tool_calling/). The first one fits.
TOOL_CALL_PARSERS = (
    ({"qwen3", "qwen3_moe"}, "<function=", "qwen3_coder"),
    ({"qwen2", "qwen3", "qwen3_moe"}, "<tool_call>", "hermes"),
    ({"llama"}, "<tool_call>", "hermes"),
    ({"llama"}, "ipython", "llama3_json"),
    ({"mistral"}, "[TOOL_CALLS]", "mistral"),
)


class BadSettings(Exception):
    """An environment variable is missing or malformed."""


class Parsers(NamedTuple):
    """vLLM's parsers of an answer. None: the model has no such part, or no parser of it is known."""

    reasoning: str | None = None
    tool_calls: str | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        reasoning = ("--reasoning-parser", self.reasoning) if self.reasoning else ()
        calls = ("--enable-auto-tool-choice", "--tool-call-parser", self.tool_calls) if self.tool_calls else ()
        return (*reasoning, *calls)


NO_PARSERS = Parsers()
VLLM_CPU = Path(__file__).with_name("vllm_cpu.py")
CLOSING = "containers.serve_vllm.closing.Closing"


@dataclass(frozen=True)
class Settings:
    """The model to serve, and how to serve it."""

    model_uri: str
    served_name: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    host: str
    port: int
    engine: str
    sampling: str
    work: Path | None  # a directory on the machine's disk, for files that outlive this process
    # How long unfinished answers may take after SIGTERM; then each answer ends its connection. 0: no time.
    drain_seconds: int
    adapters: tuple[Adapter, ...] = ()  # beside the model, which is then their base
    compile_cache: Path | None = None  # where the engine compiles; what is there is kept in the bucket (compiled.py)
    compiles_on_cpu: bool = False  # vLLM's CPU build too, which needs a C++ compiler for that and `compile_cache`

    @property
    def own_address(self) -> str:
        """HOST:PORT at which this machine reaches the server."""
        return f"{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises BadSettings that names every wrong variable."""
        problems = []
        uri, name = environ.get("DROPFORGE_MODEL_URI", ""), environ.get("DROPFORGE_SERVED_MODEL_NAME", "")
        engine = environ.get("DROPFORGE_ENGINE") or "auto"
        sampling = environ.get("DROPFORGE_SAMPLING") or "greedy"
        if not re.fullmatch(r"gs://[^/]+/models/[^/]+/?", uri):
            problems.append(f"DROPFORGE_MODEL_URI is {uri!r}; expected gs://<bucket>/models/<run>")
        if not name:
            problems.append("DROPFORGE_SERVED_MODEL_NAME is not set")
        if engine not in ENGINES:
            problems.append(f"DROPFORGE_ENGINE is {engine!r}; expected one of {', '.join(ENGINES)}")
        if sampling not in SAMPLING:
            problems.append(f"DROPFORGE_SAMPLING is {sampling!r}; expected one of {', '.join(SAMPLING)}")
        numbers = {name: _number(environ, name, problems) for name in _DEFAULTS}
        adapters: tuple[Adapter, ...] = ()
        try:
            adapters = parse(environ.get(ADAPTERS, ""), name)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise BadSettings("; ".join(problems))
        compiling = environ.get(COMPILE_CACHE)
        cache = Path(tempfile.gettempdir(), compiling) if compiling else None
        return cls(
            model_uri=uri.rstrip("/"),
            served_name=name,
            max_model_len=numbers["DROPFORGE_MAX_MODEL_LEN"],
            max_num_seqs=numbers["DROPFORGE_MAX_NUM_SEQS"],
            tensor_parallel_size=numbers["DROPFORGE_TENSOR_PARALLEL_SIZE"],
            host=environ.get("HOST") or "0.0.0.0",  # Cloud Run needs all interfaces; set 127.0.0.1 on a laptop
            port=numbers["PORT"],
            engine=engine,
            sampling=sampling,
            work=Path(work) if (work := environ.get("DROPFORGE_WORK_DIRECTORY")) else None,
            drain_seconds=numbers["DROPFORGE_DRAIN_SECONDS"],
            adapters=adapters,
            compile_cache=cache,
            compiles_on_cpu=cache is not None and environ.get("DROPFORGE_CPU_COMPILE") == "1",
        )


_DEFAULTS = {
    "DROPFORGE_MAX_MODEL_LEN": "2048",
    "DROPFORGE_MAX_NUM_SEQS": "32",
    "DROPFORGE_TENSOR_PARALLEL_SIZE": "1",
    "DROPFORGE_DRAIN_SECONDS": "0",
    "PORT": "8000",
}


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int:
    value = environ.get(name) or _DEFAULTS[name]
    if not value.isdecimal() or (int(value) < 1 and value != _DEFAULTS[name]):
        problems.append(f"{name} is {value!r}; expected a positive number")
        return 0
    return int(value)


def choose(wanted: str, *, gpu: bool, tpu: bool, vllm: bool) -> EngineName:
    """vLLM on a GPU or TPU; on a CPU vLLM's CPU build where it is installed, transformers otherwise.

    Raises BadSettings if vLLM is wanted and not installed.
    """
    if wanted == "vllm" and not vllm:
        raise BadSettings(
            "DROPFORGE_ENGINE is 'vllm', and the program vllm is not on the PATH; expected its directory there"
        )
    if wanted == "transformers" or (wanted == "auto" and not gpu and not vllm):
        return "transformers"
    if gpu:
        return "vllm"
    return "vllm-tpu" if tpu else "vllm-cpu"


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def has_tpu(devices: Path = Path("/dev")) -> bool:
    """Whether the machine has TPU chips: v4 and earlier are accel0, later generations are vfio/0."""
    return any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))


def vllm_python() -> str | None:
    """The interpreter of vLLM, beside its program on the PATH; None if vLLM is not installed.

    This process's interpreter has no vLLM: its environment has dropforge's packages alone.
    """
    program = shutil.which("vllm")
    return str(Path(program).with_name("python")) if program else None


def choose_parsers(model_type: str, chat_template: str) -> Parsers:
    """The parsers of a model's family, for the parts that its chat template has: a fine-tuned base may have none."""
    calls = (parser for types, mark, parser in TOOL_CALL_PARSERS if model_type in types and mark in chat_template)
    return Parsers(REASONING_PARSERS.get(model_type) if "<think>" in chat_template else None, next(calls, None))


def vllm_argv(
    settings: Settings, model: str, parsers: Parsers = NO_PARSERS, loaded: Sequence[Loaded] = ()
) -> list[str]:
    """vLLM on GPUs, in place of this process. Weights stream from the bucket (vLLM >= 0.11.1, extra `runai`)."""
    share = ["--model-loader-extra-config", '{"distributed": true}'] if settings.tensor_parallel_size > 1 else []
    served = [*_vllm_serve(settings, model, parsers), *vllm_flags(loaded)]
    return [*served, "--load-format", "runai_streamer", *share, *_drain(settings)]


def vllm_tpu_argv(settings: Settings, directory: str, parsers: Parsers = NO_PARSERS) -> list[str]:
    """vLLM on TPU chips, in place of this process. The TPU build reads weights only from files."""
    return [*_vllm_serve(settings, directory, parsers), *_drain(settings)]


def _drain(settings: Settings) -> list[str]:
    """The options by which vLLM finishes its answers at its end, each of which ends its connection."""
    closing = ["--shutdown-timeout", str(settings.drain_seconds), "--middleware", CLOSING]
    return closing if settings.drain_seconds else []  # vLLM cuts unfinished answers off otherwise


def vllm_tpu_environment(work: Path) -> dict[str, str]:
    """No network, and a writable cache."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}


def _vllm_serve(settings: Settings, model: str, parsers: Parsers) -> list[str]:
    size = settings.tensor_parallel_size
    return [
        *("vllm", "serve", model),
        *("--served-model-name", settings.served_name),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *(("--tensor-parallel-size", str(size)) if size > 1 else ()),
        *_answering(settings, parsers),
        *("--host", settings.host, "--port", str(settings.port)),
    ]


def vllm_cpu_argv(
    python: str,
    settings: Settings,
    directory: str,
    port: int,
    parsers: Parsers = NO_PARSERS,
    loaded: Sequence[Loaded] = (),
) -> list[str]:
    """vLLM's CPU build (vllm_cpu.py), behind the gate."""
    return [
        *(python, "-P", str(VLLM_CPU)),
        *("--model", directory),
        *("--served-model-name", settings.served_name),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--dtype", "float32"),
        *(() if settings.compiles_on_cpu else ("--enforce-eager",)),
        *_answering(settings, parsers),
        *vllm_flags(loaded),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def _answering(settings: Settings, parsers: Parsers) -> tuple[str, ...]:
    """The flags that decide how an answer is made and read, and what a request may have the server fetch."""
    return (*(GREEDY if settings.sampling == "greedy" else BASE_MODEL), *parsers.flags, *NO_MEDIA)


def transformers_argv(directory: str, port: int, loaded: Sequence[Loaded] = ()) -> list[str]:
    """`transformers serve` with token ids, probabilities and adapters (standin.py), behind the gate."""
    adapters = [f"{each.name}={each.directory}" for each in loaded]
    return [sys.executable, "-m", "containers.serve_vllm.standin", directory, str(port), *adapters]


def compile_arguments(settings: Settings, engine: EngineName, loaded: Sequence[Loaded] = ()) -> list[str]:
    """What of an engine's command changes the code that it compiles: no path and no name, which differ by start."""
    flags = vllm_flags(loaded)
    numbers = (settings.max_model_len, settings.max_num_seqs, settings.tensor_parallel_size)
    return [engine, *map(str, numbers), *(flags[: flags.index("--lora-modules")] if flags else ())]


def without_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json for an engine that answers greedily unless a request says otherwise."""
    return {name: value for name, value in config.items() if name not in SAMPLING_FIELDS}


def engine_environment(directory: Path, *, compiles: bool = False) -> dict[str, str]:
    """For the CPU engines: no network, a writable cache, no compiler, and little memory for vLLM's KV cache."""
    # vLLM compiles some functions even with --enforce-eager, with a C++ compiler.
    compiling = compile_environment(directory / "compiled") if compiles else {"TORCH_COMPILE_DISABLE": "1"}
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **compiling,
    }
