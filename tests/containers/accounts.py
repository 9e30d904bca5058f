"""The accounts of the emulated cloud of the containers' tests, and the function `access`.

Requests at the common addresses act as the project's owner. At the addresses of a trainer they act as its account,
which may not touch the runs bucket: only the run's token may, within the boundary that `access` sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from dropforge.cloud.run_access import BUCKET_VARIABLE, HOST_VARIABLE, REQUEST_VARIABLE, URL_VARIABLE
from dropforge.spec import JobSpec
from dropforge.stages.access import boundary
from dropforge_local.base.identity import BOUNDED, Identity, new_identity
from dropforge_local.base.lifetimes import TOKEN_SECONDS
from dropforge_local.base.recording import TRAINER
from dropforge_local.emulators.kit.emulator import PassiveEmulator
from dropforge_local.emulators.kit.routing import Call, Reply, Route, mount
from dropforge_local.iam import Callers, Policy
from dropforge_local.iam.terraform import Binding, Configuration
from dropforge_local.stack.tokens import Tokens

from .maxtext import job_spec
from .names import DATA, PROJECT, RUNS

ACCESS, PATH = "access", "/access"
IDENTITY = Identity(new_identity())


def _binding(caller: str, role: str, bucket: str = "") -> Binding:
    return Binding(f"serviceAccount:{_email(caller)}", role, f"projects/_/buckets/{bucket}" if bucket else "")


def _email(caller: str) -> str:
    return f"{caller}@{PROJECT}"


_BINDINGS = (
    _binding(ACCESS, "roles/storage.objectUser", RUNS),
    _binding(TRAINER, "roles/storage.objectViewer", DATA),
    _binding(TRAINER, "roles/pubsub.publisher"),
)
CALLERS = Callers(Policy(Configuration(_BINDINGS, {}, ())), IDENTITY, _email)


class Access(PassiveEmulator):
    """Answers as the function `access` does, with the boundary of the product, for any run that asks."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount([Route("POST", PATH, self._grant)])

    def _grant(self, call: Call) -> Reply:
        run, spec = json.loads(call.body)["run"], JobSpec.model_validate(job_spec())
        rules = boundary(RUNS, run, spec, is_trainer=True)
        token = IDENTITY.token(BOUNDED, json.dumps(rules), ACCESS)
        return Reply({"access_token": token, "expires_in": TOKEN_SECONDS})


def services() -> list[Any]:
    return [Tokens(IDENTITY, lambda email: email.partition("@")[0]), Access()]


def container_environment(url: str, run: str) -> dict[str, str]:
    """The variables that a container of a run gets. `url` is the address at which it acts as its account."""
    return {
        BUCKET_VARIABLE: RUNS,
        URL_VARIABLE: f"{url}{PATH}",
        REQUEST_VARIABLE: json.dumps({"run": run}),
        HOST_VARIABLE: url.removeprefix("http://"),
        "DROPFORGE_PROJECT": PROJECT,
    }
