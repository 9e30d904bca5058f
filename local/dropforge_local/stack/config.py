"""What every module of the stack shares: its state directory, its configuration, and how clients reach it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dropforge_local.base.lifetimes import KEEP_ALIVE_SECONDS, TOKEN_SECONDS

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 180.0  # a stack that ends says so at once; a busy machine may need more than a minute
ENFORCED, OFF = "enforced", "off"
OWN, ALL = "own", "all"


def find_containers() -> None:
    """Let this process import containers/, which is beside the packages in the repository."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


class StackError(Exception):
    """The stack cannot start or does not run; the message says why and what to do."""


@dataclass(frozen=True)
class StackInfo:
    """How to reach a running stack. `environment` makes dropforge's clients and settings use this stack.

    `console` is the address of the web page; whoever may write `console_directory` makes links that open it.
    """

    pid: int
    started: float
    http: str
    grpc: str
    functions: str
    project: str
    environment: dict[str, str]
    console: str


@dataclass(frozen=True)
class StackConfig:
    """A stack's configuration beside its ports, kept in <state>/config.json so that a restart reads it.

    `images` is the repository whose containers/ the images are built from; `bases` names environments in build/ that
    stand for the bases of images (images.py): with "vllm", vLLM's CPU build serves. `settings` overrides the functions'
    environment; `cloud_run`, `gke`, `kubernetes`, `tpu` and `compute` are fields of the emulators' CloudRunConfig,
    GkeConfig, KubernetesConfig, TpuConfig and ComputeConfig (quota, latencies). `record` writes the calls of functions
    and containers to <state>/calls.jsonl (recording.py); start such a stack only once. `sweep_seconds` stands for the
    schedule of Cloud Scheduler in a deployment. `token_seconds` is how long identity tokens and the tokens of runs are
    valid, `keep_alive_seconds` how long an HTTP connection without requests stays open.

    `iam` is ENFORCED (each call is checked against the bindings of the Terraform files in `terraform`) or OFF.
    `users` is OWN (only the user who started the stack, and root, reach it) or ALL: other users of the machine, too.
    `variables` overrides the variables with which those files are evaluated (deployment.VARIABLES).
    """

    images: str = str(ROOT)
    bases: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    cloud_run: dict[str, Any] = field(default_factory=dict)
    gke: dict[str, Any] = field(default_factory=dict)
    kubernetes: dict[str, Any] = field(default_factory=dict)
    tpu: dict[str, Any] = field(default_factory=dict)
    compute: dict[str, Any] = field(default_factory=dict)
    record: bool = False
    sweep_seconds: float = 60.0
    token_seconds: int = TOKEN_SECONDS
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    iam: str = ENFORCED
    users: str = OWN
    terraform: str = str(ROOT / "terraform")
    variables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.iam not in (ENFORCED, OFF):
            raise StackError(f"iam is {self.iam!r} in config.json; expected {ENFORCED!r} or {OFF!r}")
        if self.users not in (OWN, ALL):
            raise StackError(f"users is {self.users!r} in config.json; expected {OWN!r} or {ALL!r}")

    @property
    def tells_callers(self) -> bool:
        """Whether the functions name themselves in their requests."""
        return self.record or self.iam == ENFORCED

    @classmethod
    def of(cls, state: Path) -> StackConfig:
        path = state / "config.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        replace_file(state / "config.json", json.dumps(asdict(self)))


PRIVATE = 0o077  # the state holds secrets: only its owner may read it


def console_directory(state: Path) -> Path:
    """Where the tokens are that open the console (dropforge_console/passes.py)."""
    return state / "console"


def container_directories(state: Path) -> list[Path]:
    """Where Cloud Run, Kubernetes and TPU VMs keep their containers."""
    return [state / "containers", state / "pods", state / "vms"]


def replace_file(path: Path, text: str) -> None:
    """Write a file completely or not at all, so that a restart after a kill never reads half of it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.rename(path)
