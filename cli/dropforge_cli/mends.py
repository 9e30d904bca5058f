"""How to mend what preflight finds: every advice is a command, or a section of a page of docs/."""

from __future__ import annotations

import shlex

from dropforge.base.errors import SpecProblem
from dropforge.base.settings import Settings
from dropforge.spec import JobSpec
from dropforge.stages.preflight import RIGHTS, TARGETS

from .deployment import Deployment
from .sources import SOURCES, missing

POLICY = "docs/policy.md#what-a-submitter-sees"
SPECS = "docs/cli.md#specs"
# By the first part of a problem's pointer.
PAGES = {
    "target": TARGETS,
    "serve": "docs/serving.md",
    "limits": "docs/limits.md#what-admission-refuses",
    "model": "docs/training.md#does-it-fit",
    "training": "docs/training.md#does-it-fit",
    "dataset": "docs/data-formats.md",
    "evaluation": "docs/data-formats.md",
    "secrets": RIGHTS,
    "notify": RIGHTS,
}


def make(target: str, settings: Settings) -> str:
    """Return a command of the Makefile, for the deployment's project and region."""
    return f"make {target} PROJECT_ID={settings.project} REGION={settings.location}"


def make_images(settings: Settings) -> str:
    return f"{make('images', settings)} && {make('deploy', settings)}"


def of_problem(problem: SpecProblem, file: str, spec: JobSpec, deployment: Deployment) -> str:
    """Return how to mend a problem that admission found in the spec in `file`."""
    if problem.message.startswith("the secret does not exist") or problem.message.startswith("the secret's version"):
        return _secret(problem, file, deployment)
    absent = missing(spec, deployment)
    uri = spec.sources.get(problem.pointer, "")
    if uri in absent:
        if deployment.stack is not None and uri in SOURCES:
            return f"dropforge submit {shlex.quote(file)}"
        return absent[uri].command
    if "may not be" in problem.message:
        return RIGHTS
    if "of the deployment's policy" in problem.message:
        return POLICY
    return PAGES.get(problem.pointer.split("/")[1] if problem.pointer else "", SPECS)


def _secret(problem: SpecProblem, file: str, deployment: Deployment) -> str:
    """Return the command that makes a secret. A value is read from a file: a command line is kept by the shell."""
    name = (problem.found or "").strip("'").partition(":")[0]
    if deployment.stack is not None and problem.pointer != "/serve":
        return f"dropforge submit {shlex.quote(file)}"
    exists = problem.pointer == "/serve" or problem.message.startswith("the secret's version")
    action = "versions add" if exists else "create"  # `make deploy` creates the secret of the endpoints' key
    return f"gcloud secrets {action} {name} --data-file=FILE --project={deployment.settings.project}"
