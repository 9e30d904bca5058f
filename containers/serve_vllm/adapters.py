"""The adapters that a server answers with beside its base model: each has a name, by which requests select it.

The adapters are those of the revision: no request loads one. vLLM reads them from files on the machine when it starts.
So the weights at a path never change while a cache of vLLM names them, and no file can be missing later: vLLM ends at
either (docs/endpoints.md#many-adapters).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dropforge.base.errors import DropforgeError
from dropforge.cloud.clients import Clients
from dropforge.cloud.run_access import REQUEST_VARIABLE
from dropforge.run import artifacts

VARIABLE = "DROPFORGE_ADAPTERS"
CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank takes
MOST_AT_ONCE = 8  # adapters in one batch of vLLM: each takes accelerator memory for weights of the highest rank
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
# Fields of adapter_config.json that vLLM refuses, or loads and computes otherwise than PEFT (vllm/lora/peft_helper.py).
_REFUSED = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora", "alora_invocation_tokens")
_INITIAL = ("pissa", "olora", "corda", "loftq", "eva")  # initial weights that also change the base


class Adapter(BaseModel):
    """An adapter of a run. `digest` is that of its files; `proof` is the run's, for access ("": no access is set)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    run: str
    digest: str
    proof: str = ""


class Loaded(BaseModel):
    """An adapter whose files are on the machine."""

    name: str
    directory: Path
    rank: int


def parse(text: str, base: str) -> tuple[Adapter, ...]:
    """The adapters in the value of VARIABLE. Raises ValueError; `base` is the name of the base model."""
    try:
        documents = json.loads(text or "[]")
        adapters = tuple(Adapter.model_validate(each) for each in documents)
    except (ValueError, TypeError, ValidationError) as error:
        raise ValueError(f"{VARIABLE} is no list of adapters: {type(error).__name__}") from None
    names = [base, *(adapter.name for adapter in adapters)]
    if wrong := next((adapter.name for adapter in adapters if not _NAME.fullmatch(adapter.name)), None):
        raise ValueError(f"{VARIABLE} names {wrong!r}; expected lower-case letters, digits and -")
    if len(set(names)) < len(names):
        raise ValueError(f"{VARIABLE} has a name twice, or that of the base model: {', '.join(names)}")
    return adapters


def download(clients: Clients, bucket: str, adapters: tuple[Adapter, ...], directory: Path) -> list[Loaded]:
    """Download each adapter with the access of its own run. Raises DropforgeError for one that cannot be served."""
    return [_download(clients, bucket, adapter, directory / adapter.name) for adapter in adapters]


def _download(clients: Clients, bucket: str, adapter: Adapter, directory: Path) -> Loaded:
    client = _as_run(clients, adapter).storage()
    manifest = artifacts.read_manifest(client, bucket, adapter.run)
    where = f"adapter {adapter.name} of run {adapter.run}"
    if manifest is None or manifest.adapter_path is None:
        raise DropforgeError(f"{where} does not exist: the run has no committed model with an adapter")
    path = manifest.adapter_path
    if (digest := artifacts.files_digest(manifest, path)) != adapter.digest:
        raise DropforgeError(f"{where} has the digest {digest[:12]}…; expected {adapter.digest[:12]}… of the revision")
    files = artifacts.files_below(manifest, path)
    artifacts.download_files(client, f"{artifacts.model_uri(bucket, adapter.run)}/{path}", directory, files)
    config = json.loads((directory / CONFIG).read_text())
    if problem := unfit(config):
        raise DropforgeError(f"{where} cannot be served: {problem}")
    return Loaded(name=adapter.name, directory=directory, rank=config["r"])


def _as_run(clients: Clients, adapter: Adapter) -> Clients:
    """Clients that have the access of the adapter's run, where the base's run has access."""
    environment: Mapping[str, str] = clients.environment
    if not adapter.proof or REQUEST_VARIABLE not in environment:
        return clients
    request = json.dumps({"run": adapter.run, "proof": adapter.proof})
    return Clients({**environment, REQUEST_VARIABLE: request})


def unfit(config: dict[str, Any]) -> str:
    """Why vLLM would not serve an adapter with this adapter_config.json as it was trained; "" if it would."""
    if wrong := next((name for name in _REFUSED if config.get(name)), ""):
        return f"{CONFIG} has {wrong}: {config[wrong]!r:.80}, which vLLM does not take"
    initial = str(config.get("init_lora_weights", True)).lower()
    if initial.startswith(_INITIAL):
        return f"{CONFIG} has init_lora_weights: {initial!r:.80}, which changes the base's weights"
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        return f"{CONFIG} has r: {rank!r:.80}; expected a rank from 1 to {RANKS[-1]}"
    return ""


def vllm_flags(loaded: Sequence[Loaded]) -> list[str]:
    """vLLM's flags for adapters. All of them stay in memory: one that was pushed out would be read again."""
    if not loaded:
        return []
    rank = next(rank for rank in RANKS if rank >= max(each.rank for each in loaded))
    return [
        *("--enable-lora", "--max-lora-rank", str(rank)),
        *("--max-loras", str(min(len(loaded), MOST_AT_ONCE)), "--max-cpu-loras", str(len(loaded))),
        *("--lora-modules", *(f"{each.name}={each.directory}" for each in loaded)),
    ]
