"""Which deployment a command uses: a local stack, or the configured project.

The first that exists: the stack of an explicit --state; DROPFORGE_* environment variables; a running stack in the
default directory; ./dropforge.toml, whose keys are the names of the variables in lower case, without the prefix.
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
TOML_HINT = "write dropforge.toml anew: `terraform output -raw dropforge_toml > dropforge.toml`; see docs/cli.md"
LOCAL_POLL_SECONDS, CLOUD_POLL_SECONDS = 0.25, 3.0
LOCAL_PATIENCE_SECONDS, CLOUD_PATIENCE_SECONDS = 60.0, 300.0


@dataclass(frozen=True)
class Deployment:
    """The deployment that commands use; `stack` is None for a real project."""

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
    def poll_seconds(self) -> float:
        """Seconds between two requests while a command follows a run."""
        return LOCAL_POLL_SECONDS if self.stack else CLOUD_POLL_SECONDS

    @property
    def patience_seconds(self) -> float:
        """Seconds that a dropped spec may take to become a run."""
        return LOCAL_PATIENCE_SECONDS if self.stack else CLOUD_PATIENCE_SECONDS


def connect(state: str | None) -> Deployment:
    """Return the deployment and point this process's clients at it. Raises CliError."""
    if deployment := find(state):
        return deployment
    directory = state_directory(state)
    if _is_explicit(state):
        raise CliError(f"no local stack runs in {directory}", f"start it with `dropforge up --state {directory}`")
    hint = (
        "start one with `dropforge up`, go to the directory where you did, or describe a project in DROPFORGE_* "
        "variables or in dropforge.toml"
    )
    raise CliError(f"no local stack runs in {directory}, and no project is configured", hint)


def find(state: str | None) -> Deployment | None:
    """Like `connect`, but return None without a deployment. Raises CliError for a wrong configuration."""
    explicit = _is_explicit(state)
    if not explicit and "DROPFORGE_PROJECT" in os.environ:
        return _configured("the environment")
    if stack := running(state_directory(state)):
        return of_stack(stack)
    if not explicit and CONFIG.exists():
        return _configured(str(CONFIG))
    return None


def of_stack(stack: StackInfo) -> Deployment:
    """Return the deployment of a local stack and point this process's clients at it."""
    os.environ.update(stack.environment)
    return Deployment(Context.from_environment(), f"the local stack at {stack.http}", stack)


def running(state: Path) -> StackInfo | None:
    """Return the running stack of a state directory, or None."""
    if not (state / "stack.json").exists():
        return None  # importing the emulators takes a second
    from dropforge_local.stack import control as stack

    return stack.running(state)


def state_directory(option: str | None) -> Path:
    """Return the directory of the local stack's state. Same as in dropforge_local.stack.control, without its import."""
    return Path(option or os.environ.get("DROPFORGE_STATE") or "build/local").resolve()


def placeholders() -> Settings:
    """Return settings for `plan` without a deployment: each value is YOUR-… in place of a name."""
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
        raise CliError(f"the configuration of {source} is incomplete: {error}", TOML_HINT) from error
    return Deployment(context, f"project {context.settings.project}, from {source}")


def _from_file() -> dict[str, str]:
    """Return the settings of dropforge.toml as environment variables. Raises CliError."""
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
