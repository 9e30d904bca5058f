"""`make registry`, `make images` and `make deploy`, with programs that only record their arguments in the place of
gcloud, terraform and docker. The real gcloud then checks the recorded commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ..gcloud import RunGcloud
from .configuration import ROOT, blocks, images, resources
from .gcloud import refused

BASES = tomllib.loads((ROOT / "containers" / "bases.toml").read_text())
REPOSITORY = "us-central1-docker.pkg.dev/p/dropforge"
DIGEST = f"sha256:{'0' * 64}"
PROGRAM = """#!/bin/sh
line=$(basename "$0")
for word in "$@"; do
    case "$word" in *[[:space:]]*) line="$line '$word'" ;; *) line="$line $word" ;; esac
done
echo "$line" >> "$LOG"
case "$*" in
    "storage buckets describe"*) exit "$NO_BUCKET" ;;
    "iam list-testable-permissions "*) [ "$NO_ANSWER" = 0 ] || exit 1; printf "some.other.permission\n$NOT_SUPPORTED" ;;
    "builds list"*) [ "$NO_IMAGES" = 0 ] && echo build-7 || true ;;
    "builds describe build-7"*) echo "$RESULTS" ;;
    "pull --quiet docker.io/"*) [ "$BASE_FOUND" != gone ] ;;
    inspect*) echo "${4%:*}@${BASE_FOUND:-${4#*@}} some/mirror@sha256:x" ;;
    *" plan "*) echo "THE PLAN" ;;
esac
"""


@dataclass
class Done:
    """The exit code and the output of a command, and the calls of the programs."""

    code: int
    output: str
    calls: list[str]


class Machine:
    """Runs commands in a folder where gcloud, terraform and docker only record their arguments."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "log"
        for name in ("gcloud", "terraform", "docker"):
            path = directory / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(PROGRAM)
            path.chmod(0o755)
        for name in ("tools", "containers", "functions"):
            (directory / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "terraform", directory / "terraform", ignore=shutil.ignore_patterns(".terraform*"))
        shutil.copy(ROOT / "Makefile", directory)

    def run(self, *command: str, answer: str = "", **environment: str) -> Done:
        """Run a command; `answer` is its standard input."""
        self.log.unlink(missing_ok=True)
        path = f"{self.directory / 'bin'}:{os.environ['PATH']}"
        answers = dict.fromkeys(("NO_BUCKET", "NO_IMAGES", "NO_ANSWER"), "0")
        known = {"PATH": path, "LOG": str(self.log), "NOT_SUPPORTED": "", "BASE_FOUND": "", **answers}
        known |= {"RESULTS": f"{REPOSITORY}/train-trl:build-7,{DIGEST}", **environment}
        done = subprocess.run(
            command, cwd=self.directory, env=known, input=answer, capture_output=True, text=True, timeout=60
        )
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return Done(done.returncode, done.stdout + done.stderr, calls)

    def make(self, target: str, **options: str) -> Done:
        return self.run("make", "--no-print-directory", target, "PROJECT_ID=p", "REGION=us-central1", **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def applies(done: Done) -> list[str]:
    return [call for call in done.calls if re.match(r"terraform \S+ apply\b", call)]


@pytest.mark.parametrize("target", ["registry", "deploy", "destroy"])
@pytest.mark.parametrize("answer", ["", "no\n", "y\n", "YES\n"])
def test_nothing_is_applied_without_a_yes(machine: Machine, target: str, answer: str) -> None:
    done = machine.make(target, answer=answer)
    assert "THE PLAN" in done.output
    assert "Nothing was applied" in done.output
    assert (done.code != 0, applies(done)) == (True, [])


def test_the_plan_that_was_shown_is_applied(machine: Machine) -> None:
    done = machine.make("deploy", answer="yes\n")
    assert done.code == 0, done.output
    (plan,) = [call for call in done.calls if " plan " in call]
    (apply,) = applies(done)
    assert re.findall(r"-out=(\S+)", plan) == [apply.split()[-1]]
    assert "-var=project_id=p -var=region=us-central1 -var=prefix=dropforge" in plan
    assert "-target" not in plan


def test_the_digests_come_from_cloud_builds_record_of_the_newest_build(machine: Machine) -> None:
    """Nothing that the account of the build can write decides what is deployed."""
    pushed = {role: f"{REPOSITORY}/{role.replace('_', '-')}" for role in images()}
    lines = [f"{name}:{tag},{DIGEST}" for name in pushed.values() for tag in ("build-7", "latest")]
    others = [f"evil.example/train-trl:build-7,{DIGEST}", f"{REPOSITORY}/train-trl:build-6,sha256:{'1' * 64}"]
    done = machine.make("deploy", answer="yes\n", RESULTS="\n".join(lines + others))
    assert done.code == 0, done.output
    (listed,) = [call for call in done.calls if call.startswith("gcloud builds list")]
    assert f'--filter=status=SUCCESS AND substitutions._REPOSITORY="{REPOSITORY}"' in listed
    (file,) = re.findall(r"-var-file=(\S+)", "\n".join(done.calls))
    written = json.loads(Path(file).read_text())
    assert written == {"images": {role: f"{name}@{DIGEST}" for role, name in pushed.items()}}
    assert [call for call in done.calls if "storage cp" in call] == []


def test_a_build_without_results_is_not_deployed(machine: Machine) -> None:
    done = machine.make("deploy", answer="yes\n", RESULTS="")
    assert done.code != 0
    assert "names no image" in done.output
    assert [call for call in done.calls if call.startswith("terraform")] == []


def test_the_account_that_builds_writes_nothing_but_images_and_logs() -> None:
    roles = [
        body["role"]
        for body in resources().values()
        if 'google_service_account.account["build"]' in str(body.get("member"))
    ]
    writer = ["roles/artifactregistry.writer", "roles/logging.logWriter"]
    assert sorted(roles) == [*writer, "roles/storage.objectViewer", "roles/storage.objectViewer"]


def test_a_wrong_policy_stops_the_deployment_before_its_plan(machine: Machine) -> None:
    """The real command checks the policy; without the command, nothing is deployed either."""
    policy = machine.directory / "terraform" / "policy.yaml"
    policy.write_text("api_version: dropforge/v1\nmax_cost: 5\n")
    unchecked = machine.make("deploy", answer="yes\n")
    assert (unchecked.code != 0, unchecked.calls) == (True, [])
    assert "make setup" in unchecked.output
    command = machine.directory / "build" / "venv" / "bin" / "dropforge"
    command.parent.mkdir(parents=True)
    command.symlink_to(Path(sys.executable).parent / "dropforge")
    done = machine.make("deploy", answer="yes\n")
    assert (done.code != 0, done.calls) == (True, [])
    assert "terraform/policy.yaml:2: max_cost: Extra inputs are not permitted" in done.output
    policy.write_text("api_version: dropforge/v1\nmax_cost_usd: 5\n")
    assert machine.make("deploy", answer="yes\n").code == 0


def test_without_images_nothing_is_planned(machine: Machine) -> None:
    done = machine.make("deploy", answer="yes\n", NO_IMAGES="1")
    assert done.code != 0
    assert "make images" in done.output
    assert [call for call in done.calls if call.startswith("terraform")] == []


@pytest.mark.parametrize(("no_bucket", "made"), [("0", False), ("1", True)])
def test_the_bucket_for_the_state_is_created_once(machine: Machine, no_bucket: str, made: bool) -> None:
    done = machine.make("registry", answer="yes\n", NO_BUCKET=no_bucket)
    assert any("buckets create gs://p-dropforge-state " in call for call in done.calls) is made


@pytest.mark.parametrize("permission", ["workflows.callbacks.send", "iam.serviceAccounts.actAs"])
def test_a_permission_that_custom_roles_cannot_have_stops_the_deployment(machine: Machine, permission: str) -> None:
    done = machine.make("deploy", answer="yes\n", NOT_SUPPORTED=permission)
    assert done.code != 0
    assert f"in no custom role: {permission}" in done.output
    assert [call for call in done.calls if call.startswith("terraform")] == []
    assert machine.make("deploy", answer="yes\n", NOT_SUPPORTED="workflows.callbacks").code == 0, "part of a name"
    unanswered = machine.make("deploy", answer="yes\n", NO_ANSWER="1")
    assert (unanswered.code, "the apply will show it" in unanswered.output) == (0, True)


def test_only_the_locked_providers_are_installed(machine: Machine) -> None:
    for target in ("registry", "deploy", "destroy"):
        (init,) = [call for call in machine.make(target, answer="yes\n").calls if " init " in call]
        assert "-lockfile=readonly" in init


def test_make_registry_applies_the_registry_only(machine: Machine) -> None:
    (plan,) = [call for call in machine.make("registry", answer="yes\n").calls if " plan " in call]
    assert plan.endswith(" -target=terraform_data.registry")
    assert ("terraform_data", "registry") in blocks("resource")


def test_a_project_and_a_region_are_needed(machine: Machine) -> None:
    done = machine.run("make", "deploy", "PROJECT_ID=p")
    assert done.code != 0
    assert "REGION=" in done.output


def test_images_are_pushed_to_the_registry_that_terraform_creates(machine: Machine) -> None:
    (submit,) = machine.make("images").calls
    assert f"--substitutions=_REPOSITORY={REPOSITORY}" in submit
    assert "serviceAccounts/dropforge-build@p.iam.gserviceaccount.com" in submit


def test_the_build_builds_every_image_from_its_pinned_base_and_pushes_it(machine: Machine) -> None:
    build = yaml.safe_load((ROOT / "cloudbuild.yaml").read_text())
    values = {"_REPOSITORY": REPOSITORY, "BUILD_ID": "42"}
    environment = dict(substituted(line, values).split("=", 1) for line in build["options"]["env"])
    for step in build["steps"]:
        arguments = [substituted(argument, values) for argument in step["args"]]
        done = machine.run(step["entrypoint"], *arguments, **environment)
        assert done.code == 0, done.output
        (built,) = [call for call in done.calls if call.startswith("docker build")]
        assert f"--file containers/{step['id']}/Dockerfile" in built
        base = BASES[step["id"]]
        assert f"--label org.opencontainers.image.base.name={base['image']}@{base['digest']} " in built
        assert "--build-arg BASE=" not in built  # the Dockerfile has it
        name = f"{REPOSITORY}/{step['id'].replace('_', '-')}"
        assert built.endswith(f"--tag {name}:42 --tag {name}:latest")
    assert [step["id"] for step in build["steps"]] == sorted(images(), key=[*BASES].index)
    pushed = [substituted(name, values) for name in build["images"]]
    assert pushed == [f"{REPOSITORY}/{role.replace('_', '-')}:{tag}" for role in BASES for tag in ("42", "latest")]


@pytest.mark.parametrize("found", ["gone", f"sha256:{'f' * 64}"])
def test_a_base_without_the_expected_digest_stops_the_build_which_names_it(machine: Machine, found: str) -> None:
    done = machine.run(
        "bash", "containers/build.sh", "train_trl", REPOSITORY=REPOSITORY, BUILD_ID="42", BASE_FOUND=found
    )
    assert done.code == 1
    assert f"{BASES['train_trl']['image']} with digest {BASES['train_trl']['digest']}" in done.output
    assert "containers/bases.toml" in done.output
    assert [call for call in done.calls if call.startswith("docker build")] == []


def test_builders_and_actions_are_pinned() -> None:
    build = yaml.safe_load((ROOT / "cloudbuild.yaml").read_text())
    builders = {step["name"] for step in build["steps"]}
    assert [name for name in builders if not re.fullmatch(r"gcr\.io/[\w./-]+@sha256:[0-9a-f]{64}", name)] == []
    for path in (*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ROOT / "docs" / "ci.md"):
        uses = re.findall(r"uses: (\S+)(.*)", path.read_text())
        assert uses
        assert [action for action, note in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []
        assert [action for action, note in uses if not re.fullmatch(r" +# v\d+\.\d+\.\d+", note)] == []


def substituted(text: str, values: dict[str, str]) -> str:
    """Substitute as Cloud Build does: $NAME and ${NAME} are replaced, $$ is a dollar sign."""
    return re.sub(r"\$(?:\$|\{?(\w+)\}?)", lambda match: values[match[1]] if match[1] else "$", text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_accepts_every_command(machine: Machine, tmp_path: Path, run_gcloud: RunGcloud) -> None:
    calls = machine.make("registry", answer="yes\n", NO_BUCKET="1").calls
    calls += machine.make("images").calls + machine.make("deploy", answer="yes\n").calls
    commands = sorted({call for call in calls if call.startswith("gcloud ")})
    assert len(commands) >= 5
    (tmp_path / "gcloud").mkdir()
    assert refused(run_gcloud, commands, tmp_path / "gcloud") == {}


@pytest.mark.parametrize("script", ["tools/deploy.sh", "containers/build.sh"])
def test_scripts_are_clean(script: str) -> None:
    done = subprocess.run(["shellcheck", ROOT / script], env=_with_venv(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def _with_venv() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
