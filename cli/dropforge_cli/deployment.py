"""Which deployment a command talks to: a local stack, or the project that the configuration names.

In this order: the stack of an explicit --state; DROPFORGE_* environment variables; a stack that runs in the default
directory; ./dropforge.toml, whose keys are those variables' names without the prefix, in lower case.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from dropforge.base.errors import DropforgeError
from dropforge.base.settings import Settings
from dropforge.cloud.clients import Clients
from dropforge.context import Context
from dropforge.run.store import RunStore

from .problems import CliError

if TYPE_CHECKING:
    from dropforge_local.stack.config import StackInfo

CONFIG = Path("dropforge.toml")
LOCAL_LOOK_SECONDS, CLOUD_LOOK_SECONDS = 0.25, 3.0
LOCAL_PATIENCE_SECONDS, CLOUD_PATIENCE_SECONDS = 60.0, 300.0


@dataclass(frozen=True)
class Deployment:
    """Where the commands go; `stack` is None for a real project."""

    context: Context
    where: str
    stack: StackInfo | None = None

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def clients(self) -> Clients:
        return self.context.cloud.clients

    @property
    def store(self) -> RunStore:
        """The runs bucket."""
        return self.context.store

    @property
    def look_seconds(self) -> float:
        """How often to look when following something."""
        return LOCAL_LOOK_SECONDS if self.stack else CLOUD_LOOK_SECONDS

    @property
    def patience_seconds(self) -> float:
        """How long a dropped spec may take to become a run."""
        return LOCAL_PATIENCE_SECONDS if self.stack else CLOUD_PATIENCE_SECONDS


def connect(state: str | None) -> Deployment:
    """The deployment to talk to; this process's clients are pointed at it. Raises CliError."""
    if found := find(state):
        return found
    directory = state_directory(state)
    if _is_explicit(state):
        raise CliError(f"no local stack runs in {directory}", f"start it with `dropforge up --state {directory}`")
    hint = "start one with `dropforge up`, or describe a project in DROPFORGE_* variables or in dropforge.toml"
    raise CliError(f"no local stack runs in {directory}, and no project is configured", hint)


def find(state: str | None) -> Deployment | None:
    """Like `connect`, but None when there is nothing to talk to. Raises CliError for a configuration that is wrong."""
    explicit = _is_explicit(state)
    if not explicit and "DROPFORGE_PROJECT" in os.environ:
        return _configured("the environment")
    if stack := running(state_directory(state)):
        return of_stack(stack)
    if not explicit and CONFIG.exists():
        return _configured(str(CONFIG))
    return None


def of_stack(stack: StackInfo) -> Deployment:
    """The deployment that a local stack is; this process's clients are pointed at it."""
    os.environ.update(stack.environment)
    return Deployment(Context.from_environment(), f"the local stack at {stack.http}", stack)


def running(state: Path) -> StackInfo | None:
    """The live stack of a state directory."""
    if not (state / "stack.json").exists():
        return None  # importing the emulators to find that out takes a second
    from dropforge_local.stack import control as stack

    return stack.running(state)


def state_directory(option: str | None) -> Path:
    """Where the local stack keeps its state; as dropforge_local.stack.control.state_directory, without importing it."""
    return Path(option or os.environ.get("DROPFORGE_STATE") or "build/local").resolve()


def placeholders() -> Settings:
    """Settings that say by their values that nothing is deployed, for `plan`."""
    required = [field.name for field in fields(Settings) if field.default is MISSING]
    values = {name: f"YOUR-{name.upper().replace('_', '-')}" for name in required}
    optional = {
        "gke_cluster": "YOUR-CLUSTER",
        "nodes_service_account": "YOUR-NODES-SERVICE-ACCOUNT",
        "serve_vllm_tpu_image": "YOUR-SERVE-VLLM-TPU-IMAGE",
        "train_maxtext_image": "YOUR-TRAIN-MAXTEXT-IMAGE",
        "train_ray_image": "YOUR-TRAIN-RAY-IMAGE",
    }
    return Settings(**{**values, **optional, "location": "us-central1"})  # type: ignore[arg-type]


def _is_explicit(state: str | None) -> bool:
    return bool(state or os.environ.get("DROPFORGE_STATE"))


def _configured(source: str) -> Deployment:
    for name, value in _from_file().items():
        os.environ.setdefault(name, value)
    try:
        context = Context.from_environment()
    except DropforgeError as error:
        raise CliError(f"the configuration of {source} is incomplete: {error}", "see docs/cli.md") from error
    return Deployment(context, f"project {context.settings.project}, from {source}")


def _from_file() -> dict[str, str]:
    """What dropforge.toml says, as environment variables. Raises CliError."""
    if not CONFIG.exists():
        return {}
    try:
        table = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{CONFIG} is not TOML: {error}") from error
    known = [field.name for field in fields(Settings)]
    for key, value in table.items():
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise CliError(f"{CONFIG} has the unknown key {key!r}", f"did you mean {close[0]!r}?" if close else "")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise CliError(f"{CONFIG}: {key} is {value!r}; expected text or a whole number")
    return {f"DROPFORGE_{key.upper()}": str(value) for key, value in table.items()}
