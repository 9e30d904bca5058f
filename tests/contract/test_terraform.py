"""terraform/ agrees with the code that it deploys, and with the deployment of the local stack."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

from dropforge.base import names
from dropforge.base.settings import Settings
from dropforge.cloud.tpu import SERVER_PORT, SERVER_TAG
from dropforge.platforms import platform_of, servers, targets
from dropforge.platforms.cloud_run.catalog import CLOUD_RUN_MACHINES
from dropforge.spec.policy import MAX_POLICY_BYTES
from dropforge_cli.preflight import ALWAYS
from dropforge_local.emulators.eventarc import ACK_DEADLINE_SECONDS
from dropforge_local.stack import deployment as stack
from dropforge_local.stack.functions_host import entry_points

from ..schemas import google_provider
from .configuration import ROOT, TERRAFORM, blocks, enabled_apis, images, local, permissions, render, resources

DATA = ROOT / "tests" / "data"
CHECKOV = ROOT / "build" / "checkov" / "bin" / "checkov"
ACCOUNTS: dict[str, dict[str, Any]] = permissions()["accounts"]
GRANTS = [(account, scope, held) for account, body in ACCOUNTS.items() for scope, held in body["grants"].items()]
SAMPLES: list[dict[str, Any]] = yaml.safe_load((DATA / "google_provider_samples.yaml").read_text())
# Arguments without a sample; the provider's schema and Google's page of the method have them.
UNSAMPLED = {
    "google_cloud_run_v2_service": {
        "template.max_instance_request_concurrency",
        "template.scaling",
        "template.scaling.max_instance_count",
        "template.scaling.min_instance_count",
    },
    "google_container_cluster": {"description"},
}
LOCAL = {"project_id": stack.PROJECT, "region": stack.LOCATION, "prefix": "dropforge"}
TEXT = {path.name: path.read_text() for path in sorted(TERRAFORM.glob("*.tf"))}
REQUIRED = {field.name for field in fields(Settings) if field.default is MISSING}
IMAGE_FIELDS = {field.name for field in fields(Settings) if field.name.endswith("_image")}
NAMING = ("account_id", "display_name", "name", "repository_id", "role_id", "secret_id")
# No role in the source of the data file holds these permissions. Google's page about them
# (https://cloud.google.com/iam/docs/roles-permissions/container) could not be read; custom roles that others
# have published hold the permissions of services, service accounts and storage classes.
LISTED_ELSEWHERE = {
    "container.events.list",
    "container.serviceAccounts.create",
    "container.services.create",
    "container.services.get",
    "container.storageClasses.create",
}
# Specs name secrets and work in every deployment; a binding has the name of its resource.
NAMED_OTHERWISE = ("google_secret_manager_secret", "_iam_member")


def test_the_functions_are_the_entry_points() -> None:
    assert [name for name, account in ACCOUNTS.items() if "called_by" in account] == entry_points()


def test_each_function_has_the_caller_that_the_flow_needs() -> None:
    workflow = "".join(path.read_text() for path in sorted((ROOT / "workflows").glob("*.workflows.yaml")))
    called = re.findall(r"name: (\w+)\n\s+body:", workflow)
    triggers = {trigger.name.replace("-", "_"): trigger.function for trigger in stack.triggers()}
    expected = {**dict.fromkeys(called, "workflow"), **dict.fromkeys(triggers.values(), "events"), "sweep": "scheduler"}
    expected |= {"access": "trainer", "ask": "console", "preflight": "console"}
    assert {name: ACCOUNTS[name]["called_by"] for name in entry_points()} == expected
    assert triggers.pop("on_console") == "on_spec_message"  # of a deployment with a console
    assert {name: trigger["function"] for name, trigger in local("_triggers").items()} == triggers


def test_every_setting_exists_and_every_required_setting_is_given() -> None:
    given = {*local("_settings"), *(f"{role}_image" for role in images() if role != "console")}
    assert REQUIRED <= given <= {field.name for field in fields(Settings)}


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        (("google_storage_bucket", "specs"), stack.SPECS_BUCKET),
        (("google_storage_bucket", "runs"), stack.RUNS_BUCKET),
        (("google_pubsub_topic", "requests"), stack.REQUESTS),
        (("google_pubsub_topic", "operations"), stack.OPERATIONS),
        (("google_pubsub_topic", "console"), stack.CONSOLE),
        (("google_pubsub_topic", "job_events"), stack.JOB_EVENTS),
        (("google_pubsub_topic", "run_events"), stack.RUN_EVENTS),
        (("google_workflows_workflow", "run"), stack.WORKFLOW),
        (("google_workflows_workflow", "rollout"), stack.ROLLOUT_WORKFLOW),
        (("google_container_cluster", "region"), stack.CLUSTER.rsplit("/", 1)[1]),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_names_are_those_of_the_local_stack(resource: tuple[str, str], expected: str) -> None:
    assert render(resources()[resource]["name"], **LOCAL) == expected


def test_terraform_limits_the_policy_as_the_command_does() -> None:
    assert f"length(local.policy) <= {MAX_POLICY_BYTES} " in TEXT["functions.tf"]


def test_the_workflow_is_given_every_variable_that_it_reads() -> None:
    text = (ROOT / "workflows" / "run.workflows.yaml").read_text()
    read = {name for name in re.findall(r'sys\.get_env\("(\w+)"\)', text) if not name.startswith("GOOGLE_CLOUD_")}
    assert set(resources()["google_workflows_workflow", "run"]["user_env_vars"]) == read


def test_every_api_that_the_code_names_is_enabled() -> None:
    """tests/contract/test_calls.py has the APIs that are called through Google's clients."""
    code = [path for top in ("functions", "cli", "console") for path in (ROOT / top).rglob("*.py")]
    address = re.compile(r"https://([a-z]+)\.googleapis\.com|google_apis\.(?:get|post)\(\s*\"([a-z]+)\"")
    named = {api for path in code for found in address.findall(path.read_text()) for api in found if api}
    assert {"sts", "cloudquotas"} <= named
    assert named - {"www"} <= enabled_apis()


def test_preflight_asks_only_for_apis_that_are_enabled() -> None:
    of_platforms = {name for kind in {*targets(), *servers()} for name in platform_of(kind).services}
    assert {"iamcredentials", "sts"} <= {*ALWAYS}
    assert {*ALWAYS, *of_platforms} <= enabled_apis()


@pytest.mark.parametrize("kind", ["variable", "output"])
def test_variables_and_outputs_are_described_and_sorted(kind: str) -> None:
    declared = blocks(kind)
    assert [name for (name,), block in declared.items() if not block.get("description", "").strip()] == []
    assert list(declared) == sorted(declared)


def test_every_name_starts_with_the_prefix() -> None:
    starts = ("${var.prefix}", "${var.project_id}-${var.prefix}-", '${replace("${var.prefix}_', "${google_")
    strange = [
        (*labels, block[key])
        for labels, block in resources().items()
        for key in NAMING
        if key in block and not block[key].startswith(starts) and not labels[0].endswith(NAMED_OTHERWISE)
    ]
    assert strange == []


def test_dead_letter_topics_have_subscriptions_that_never_expire() -> None:
    topic = resources()["google_pubsub_topic", "dead_letter"]
    subscription = resources()["google_pubsub_subscription", "dead_letter"]
    assert topic["for_each"] == subscription["for_each"] == "${local.triggers}"
    assert subscription["expiration_policy"] == [{"ttl": ""}]
    assert "retry_policy" not in resources()["google_eventarc_trigger", "trigger"], (
        "retry_policy can only switch retries off"
    )


def test_the_acknowledgement_deadline_is_longer_than_a_function_may_run() -> None:
    update = resources()["terraform_data", "dead_letter"]
    [function] = resources()["google_cloudfunctions2_function", "function"]["service_config"]
    assert "--ack-deadline=${self.triggers_replace.ack_deadline}" in str(update["provisioner"])
    assert update["triggers_replace"]["ack_deadline"] == ACK_DEADLINE_SECONDS > function["timeout_seconds"]


def test_buckets_are_private() -> None:
    for bucket in resources("google_storage_bucket").values():
        assert (bucket["uniform_bucket_level_access"], bucket["public_access_prevention"]) == (True, "enforced")


def test_nothing_is_public_and_nobody_has_a_broad_role() -> None:
    assert re.findall(r"allUsers|allAuthenticatedUsers", "".join(TEXT.values())) == []
    roles = set(re.findall(r"roles/[\w.]+", "".join(TEXT.values())))
    assert roles == {
        "roles/artifactregistry.reader",  # nodes, on the repository
        "roles/artifactregistry.writer",  # build, on the repository
        "roles/container.defaultNodeServiceAccount",  # nodes
        "roles/eventarc.eventReceiver",  # events
        "roles/eventarc.serviceAgent",  # Eventarc's own agent, as Google grants it
        "roles/iap.httpsResourceAccessor",  # viewers of the console, on its service
        "roles/iam.workloadIdentityUser",  # the trainer's and the server's pods, on the account that they are
        "roles/logging.logWriter",  # build
        "roles/pubsub.publisher",  # Pub/Sub's agent on dead-letter topics, Cloud Storage's agent
        "roles/pubsub.serviceAgent",  # Pub/Sub's own agent, as Google grants it
        "roles/pubsub.subscriber",  # Pub/Sub's agent on the triggers' subscriptions
        "roles/run.invoker",  # each caller on the functions that it calls, and IAP's agent on the console
        "roles/storage.legacyBucketReader",  # preflight, for the location of data_buckets, whatever their project
        "roles/storage.objectUser",  # submitters on the specs bucket
        # build on its bucket and functions' sources, submitters on the runs bucket, and data_buckets
        "roles/storage.objectViewer",
        "roles/workflows.serviceAgent",  # Workflows' own agent, as Google grants it
    }


def test_only_functions_that_start_containers_may_act_as_another_account() -> None:
    acting = {(account, scope) for account, scope, held in GRANTS if "iam.serviceAccounts.actAs" in held}
    trains, serves = {("provision", "trainer_account"), ("provision", "nodes_account")}, "server_account"
    assert acting == {*trains, ("deploy", serves), ("rollout", serves)}


def test_every_scope_is_described_and_bound() -> None:
    scopes = {scope for _, scope, _ in GRANTS}
    assert scopes == set(permissions()["scopes"])
    bound = {*local("bucket_scopes"), *local("secret_scopes"), *local("topic_scopes"), *local("account_scopes")}
    bound |= set(local("project_scopes"))
    compared = set(re.findall(r'grant\.scope == "(\w+)"', TEXT["iam.tf"]))
    assert scopes == bound | compared


def test_a_call_needs_the_same_permissions_in_every_account() -> None:
    needs: dict[tuple[str, str], set[frozenset[str]]] = {}
    for account in ACCOUNTS.values():
        calls: dict[str, set[str]] = {}
        for held in account["grants"].values():
            for permission, reasons in held.items():
                assert reasons, permission
                for call in reasons:
                    calls.setdefault(call, set()).add(permission)
        for call, needed in calls.items():
            needs.setdefault((call, ""), set()).add(frozenset(needed))
    assert {call: different for (call, _), different in needs.items() if len(different) > 1} == {}


def test_permissions_exist() -> None:
    known = set(yaml.safe_load((DATA / "iam_permissions.yaml").read_text()))
    assert {permission for *_, held in GRANTS for permission in held} - known == LISTED_ELSEWHERE


FOREIGN = {"data_buckets", "data_locations", "model_buckets"}  # which get predefined roles


def test_what_is_known_about_permissions_in_custom_roles_is_written_down() -> None:
    known = yaml.safe_load((DATA / "iam_custom_roles.yaml").read_text())
    shown, unknown = set(known["in_public_custom_roles"]), set(known["not_shown"])
    held = {permission for _, scope, held in GRANTS if scope not in FOREIGN for permission in held}
    assert shown & unknown == set()
    assert shown | unknown == held


def test_no_value_of_a_secret_passes_through_terraform() -> None:
    assert resources("google_secret_manager_secret_version") == {}
    assert "sensitive" not in "".join(TEXT.values())


def test_the_deployment_carries_no_label_that_the_sweep_reads() -> None:
    ownership = {names.MANAGED_BY, names.RUN_LABEL, names.ATTEMPT_LABEL, names.EXPIRES_LABEL, names.DEPLOYMENT_LABEL}
    (label,) = blocks("provider")[("google",)]["default_labels"]
    assert label not in ownership
    assert [labels for labels, block in resources().items() if ownership & set(block.get("labels", {}))] == []


def test_every_region_with_a_gpu_has_a_subnetwork() -> None:
    offered = {region for machine in CLOUD_RUN_MACHINES.values() for region in machine.regions}
    assert set(blocks("variable")[("subnetwork_ranges",)]["default"]) == offered


def test_the_firewall_lets_requests_through_to_endpoints_on_tpu_vms() -> None:
    rule = resources()["google_compute_firewall", "servers"]
    assert (rule["target_tags"], rule["allow"]) == ([SERVER_TAG], [{"protocol": "tcp", "ports": [str(SERVER_PORT)]}])


def test_providers_are_pinned_exactly() -> None:
    (providers,) = blocks("terraform")[()]["required_providers"]
    versions = {name: provider["version"] for name, provider in providers.items()}
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    locked = hcl2.loads((TERRAFORM / ".terraform.lock.hcl").read_text())["provider"]
    providers = {name.strip('"').rpartition("/")[2]: provider for entry in locked for name, provider in entry.items()}
    assert {name: provider["version"].strip('"') for name, provider in providers.items()} == versions
    for provider in providers.values():
        schemes = [hash_.strip('"').partition(":")[0] for hash_ in provider["hashes"]]
        assert schemes.count("h1") >= 1, "of an unpacked provider"
        assert schemes.count("zh") >= 10, "of each platform's archive"


def test_every_image_is_built_and_every_required_image_is_demanded() -> None:
    built = {f"{role}_image" for role in images() if role != "console"}
    containers = {f"{path.parent.name}_image" for path in ROOT.glob("containers/*/Dockerfile")}
    assert IMAGE_FIELDS & (containers | REQUIRED) == built, (
        "cloudbuild.yaml builds the containers that settings.py names"
    )
    (condition,) = [condition for condition in _preconditions() if "var.images" in condition]
    assert {f"{role}_image" for role in re.findall(r'"(\w+)"', condition)} == IMAGE_FIELDS & REQUIRED


@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
def test_terraform_fmt_changes_nothing() -> None:
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", TERRAFORM], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("kind", "described"), [("resource", "resources"), ("data", "data_sources")])
def test_the_provider_has_every_type_and_argument(kind: str, described: str) -> None:
    schemas = google_provider.schemas(described)
    used = {labels: body for labels, body in blocks(kind).items() if labels[0].startswith("google_")}
    assert {labels[0] for labels in used} == schemas.keys()
    problems = [google_provider.problems(".".join(labels), body, schemas[labels[0]]) for labels, body in used.items()]
    assert list(chain.from_iterable(problems)) == []


@pytest.mark.parametrize(
    ("resource", "change", "problem"),
    [
        (("google_storage_bucket", "runs"), {"locaton": "US"}, "locaton: unknown"),
        (("google_storage_bucket", "runs"), {"uniform_bucket_level_access": "yes"}, "'yes' is no bool"),
        (("google_storage_bucket", "runs"), {"soft_delete_policy": {}}, "written as an argument"),
        (("google_storage_bucket", "runs"), {"location": [{}]}, "written as a block"),
        (("google_storage_bucket", "runs"), {"soft_delete_policy": [{}, {}]}, "appears 2 times"),
        (("google_storage_bucket", "runs"), {"lifecycle_rule": [{"action": [{}], "condition": [{}]}]}, "type: missing"),
        (("google_monitoring_alert_policy", "alert"), {"combiner": "XOR"}, "'XOR' is none of AND"),
        (("google_service_account", "account"), {"email": "a@b.c"}, "set by Google only"),
        (("google_container_cluster", "region"), {"release_channel": [{"channel": "NONE"}]}, "'NONE' is none of"),
        (("google_storage_bucket", "runs"), {"public_access_prevention": "on"}, "'on' is none of enforced"),
        (("google_pubsub_topic", "run_events"), {"message_retention_duration": "599s"}, "'599s' is not from 600"),
        (("google_pubsub_topic", "run_events"), {"message_retention_duration": "7d"}, "'7d' is not from 600"),
        (("google_pubsub_subscription", "dead_letter"), {"ack_deadline_seconds": 601}, "601 is not from 10 to 600"),
    ],
)
def test_a_mistake_in_a_resource_is_noticed(resource: tuple[str, str], change: dict[str, Any], problem: str) -> None:
    body = {**resources()[resource], **change}
    problems = google_provider.problems(".".join(resource), body, google_provider.schemas("resources")[resource[0]])
    assert problem in "; ".join(problems)


def test_a_missing_argument_is_noticed() -> None:
    body = dict(resources()["google_storage_bucket", "runs"])
    del body["location"]
    problems = google_provider.problems("runs", body, google_provider.schemas("resources")["google_storage_bucket"])
    assert list(problems) == ["runs.location: missing"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["sample"])
def test_the_descriptions_fit_googles_acceptance_tests(sample: dict[str, Any]) -> None:
    schema = google_provider.schemas("resources")[sample["resource"]]
    assert list(google_provider.problems(sample["sample"], sample["arguments"], schema)) == []


@pytest.mark.parametrize("kind", sorted({sample["resource"] for sample in SAMPLES}))
def test_googles_acceptance_tests_have_every_argument(kind: str) -> None:
    shown = {path for sample in SAMPLES if sample["resource"] == kind
             for path in google_provider.arguments(sample["arguments"])}  # fmt: skip
    used = {path for body in resources(kind).values() for path in google_provider.arguments(body)}
    assert used - shown == UNSAMPLED.get(kind, set())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not CHECKOV.exists(), reason="checkov is not installed (make checkov)")
def test_checkov_finds_nothing() -> None:
    command = [str(CHECKOV), "--config-file", str(ROOT / ".checkov.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", images())
def test_dockerfiles_are_clean(role: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no package for this platform")
    options = ["--config", str(ROOT / ".hadolint.yaml"), "--no-color"]
    command = [str(hadolint), *options, str(ROOT / "containers" / role / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _preconditions() -> list[str]:
    (lifecycle,) = resources()["google_cloudfunctions2_function", "function"]["lifecycle"]
    return [block["condition"] for block in lifecycle["precondition"]]
