"""The real `terraform` applies terraform/ to a provider that creates nothing; the planned resources fit the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.base.names import CONSOLE_SPECS_PREFIX
from dropforge.base.settings import Settings
from dropforge.spec.policy import policy_of
from dropforge_console.iap import Behind
from dropforge_console.live import STREAM_SECONDS
from dropforge_console.people import Members
from dropforge_local.iam.conditions import Resource, compile_condition
from dropforge_local.iam.terraform import read_configuration
from dropforge_local.stack import deployment as stack
from dropforge_local.stack.functions_host import entry_points

from ..gcloud import RunGcloud
from ..schemas import google_provider, kubernetes
from ..schemas.google_provider import Argument, Schema
from .configuration import ROOT, images, permissions
from .gcloud import refused
from .provider import Provider

PROJECT, REGION, NUMBER = stack.PROJECT, stack.LOCATION, "123456789"
IMAGES = {role: f"{stack.IMAGES}/{role.replace('_', '-')}@sha256:{'0' * 64}" for role in images()}
OF_CONTAINERS_OF_RUNS = {role: image for role, image in IMAGES.items() if role != "console"}
# Every optional part is on.
VARIABLES = {
    "alert_emails": ["oncall@example.com"],
    "billing_account": "000000-111111-222222",
    "cluster_regions": [REGION],
    "console_admins": ["user:ada@example.com"],
    "console_submitters": ["domain:example.com", "user:sam@example.com"],
    "console_viewers": ["group:viewers@example.com"],
    "data_buckets": ["datasets"],
    "endpoint_domain": "models.internal",
    "endpoint_gateway": {REGION: stack.PROXY_RANGE},
    "ephemeral_cluster_regions": [REGION],
    "images": IMAGES,
    "model_buckets": ["other-runs"],
    "operators": ["group:ml-ops@example.com"],
    "otlp_endpoint": "https://telemetry.googleapis.com",
    "project_id": PROJECT,
    "region": REGION,
    "request_topics": {"search": ["group:ml@example.com"]},
    "slack_webhook_secret": "slack-webhook",
    "submitters": ["group:ml@example.com"],
    "tpu_regions": [REGION],
    "training_secrets": ["hf-token"],
    "webhook_secrets": ["team-webhook"],
}
# Numbers, text, lists and null as Terraform's YAML and JSON carry them.
POLICY = """
api_version: dropforge/v1
max_cost_usd: 12.5
max_nodes: 2
max_ttl: null
regions: ["europe-*"]
by_label:
  - {labels: {team: interns}, max_duration: 90s}
"""
CONSOLE = f"https://dropforge-console-{NUMBER}.{REGION}.run.app"
PUBLISHED = "google.cloud.pubsub.topic.v1.messagePublished"
TOPICS = (stack.REQUESTS, stack.OPERATIONS, stack.JOB_EVENTS)
GATEWAY_API = ("gateway.networking.k8s.io/v1", "networking.gke.io/v1")
ARCHIVE = ("output_file_mode", "output_path", "output_sha256", "source_dir", "type")
Applied = dict[str, list[dict[str, Any]]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # five runs of terraform, once
    pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed"),
]


def google() -> Provider:
    return Provider(google_provider.schemas("resources"), google_provider.schemas("data_sources"), invent)


def archive() -> Provider:
    arguments = {name: Argument("string", required=name in ("output_path", "type")) for name in ARCHIVE}
    return Provider({}, {"archive_file": Schema({**arguments, "excludes": Argument("set(string)")})}, invent)


def invent(kind: str, attribute: str, values: dict[str, Any]) -> str:
    """The value that Google would give to an argument of a resource."""
    email = f"{values.get('account_id')}@{PROJECT}.iam.gserviceaccount.com"
    known = {
        ("google_artifact_registry_repository", "name"): str(values.get("repository_id")),
        ("google_project", "number"): NUMBER,
        ("google_service_account", "email"): email,
        ("google_service_account", "member"): f"serviceAccount:{email}",
        ("google_service_account", "name"): f"projects/{PROJECT}/serviceAccounts/{email}",
        ("google_project_iam_custom_role", "id"): f"projects/{PROJECT}/roles/{values.get('role_id')}",
        ("google_secret_manager_secret", "id"): f"projects/{PROJECT}/secrets/{values.get('secret_id')}",
        ("google_pubsub_topic", "id"): f"projects/{PROJECT}/topics/{values.get('name')}",
        (
            "google_cloudfunctions2_function",
            "url",
        ): f"https://{REGION}-{PROJECT}.cloudfunctions.net/{values.get('name')}",
        ("google_eventarc_trigger", "subscription"): f"projects/{PROJECT}/subscriptions/eventarc-{REGION}-trigger",
    }
    return known.get((kind, attribute), f"{kind} {attribute}")


def terraform(directory: Path, *arguments: str, providers: dict[str, Any]) -> str:
    environment = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "HOME": str(directory),
        "CHECKPOINT_DISABLE": "1",
        "TF_IN_AUTOMATION": "1",
        "GOGC": "800",  # rare collections of garbage: they took a quarter of terraform's processor time
        "TF_REATTACH_PROVIDERS": json.dumps(providers),
    }
    command = ["terraform", *arguments, "-no-color"]
    done = subprocess.run(command, cwd=directory / "terraform", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of terraform/ with local state, and a gcloud and a sleep that only record their commands."""
    return copy_of_terraform(tmp_path_factory.mktemp("apply"))


def copy_of_terraform(directory: Path) -> Path:
    shutil.copytree(
        ROOT / "terraform", directory / "terraform", ignore=shutil.ignore_patterns(".terraform*", "*.tfvars")
    )
    for name in ("functions", "workflows"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "terraform" / "backend_override.tf").write_text('terraform {\n  backend "local" {}\n}\n')
    (directory / "terraform" / "test.auto.tfvars.json").write_text(json.dumps(VARIABLES))
    (directory / "terraform" / "policy.yaml").write_text(POLICY)
    (directory / "bin").mkdir()
    for name in ("gcloud", "sleep"):
        program = directory / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {directory}/{name}.log\n')
        program.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def applied(directory: Path) -> Applied:
    """Every created resource, by type."""
    provider = google()
    with serving(provider) as providers:
        terraform(directory, "init", "-input=false", providers=providers)
        terraform(directory, "validate", providers=providers)
        registry = ("-input=false", "-auto-approve", "-target=terraform_data.registry", "-var=images={}")
        terraform(directory, "apply", *registry, providers=providers)
        before_images = {kind for kind, _ in provider.applied}
        terraform(directory, "apply", "-input=false", "-auto-approve", providers=providers)
        output = terraform(directory, "output", "-json", providers=providers)
    made: Applied = {"before_images": [dict.fromkeys(before_images)]}
    for kind, values in provider.applied:
        made.setdefault(kind, []).append(values)
    made["output"] = [{name: described["value"] for name, described in json.loads(output).items()}]
    return made


@pytest.fixture(scope="module")
def graph(applied: Applied, directory: Path) -> str:
    """Return Terraform's graph of dependencies; it leaves out those that follow from others."""
    assert applied, "the directory is initialized"
    with serving(google()) as providers:
        return terraform(directory, "graph", providers=providers)


@contextmanager
def serving(provider: Provider) -> Iterator[dict[str, Any]]:
    """The value of TF_REATTACH_PROVIDERS while `provider` takes the place of `google`."""
    hosts = "registry.terraform.io/hashicorp"
    with provider.serving() as first, archive().serving() as second:
        yield {f"{hosts}/google": first, f"{hosts}/archive": second}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("uniform_bucket_level_access = true", "uniform_bucket_acces = true", "Unsupported argument"),
        ("location ", "# location ", "Missing required argument"),
        ("soft_delete_policy {", "soft_delete {", "Unsupported block type"),
    ],
)
def test_terraform_notices_a_mistake(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = copy_of_terraform(tmp_path) / "terraform" / "buckets.tf"
    text = re.sub(rf"{old.replace(' ', ' +')}", new, path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    with serving(google()) as providers:
        terraform(tmp_path, "init", "-input=false", providers=providers)
        with pytest.raises(AssertionError, match=problem):
            terraform(tmp_path, "validate", providers=providers)


def test_make_registry_creates_the_registry_and_no_function(applied: Applied) -> None:
    (made,) = applied["before_images"]
    assert {"google_artifact_registry_repository", "google_service_account", "google_storage_bucket"} <= set(made)
    assert FUNCTION not in made


def test_make_registry_grants_what_a_build_of_functions_needs_long_before_it(graph: str) -> None:
    """A right that `make deploy` granted just before the build would not hold yet."""
    assert '"terraform_data.registry" -> "google_project_iam_member.build_source"' in graph


def test_one_more_api_changes_nothing_else(applied: Applied, directory: Path) -> None:
    """A data source that is read only during the apply leaves everything that follows from it unknown in the plan."""
    assert applied
    more = shutil.copytree(directory, directory.with_name("more"), symlinks=True) / "terraform" / "apis.tf"
    more.write_text(more.read_text().replace('"run.googleapis.com",', '"run.googleapis.com", "more.googleapis.com",'))
    with serving(google()) as providers:
        plan = terraform(more.parents[1], "plan", "-input=false", providers=providers)
    assert re.findall(r"^  # (.*)$", plan, re.M) == [
        'google_project_service.api["more.googleapis.com"] will be created'
    ]


def test_functions_read_their_settings(applied: Applied) -> None:
    functions = {f["build_config"][0]["entry_point"]: f["service_config"][0] for f in applied[FUNCTION]}
    assert set(functions) == set(entry_points())
    for name, config in functions.items():
        settings = Settings.from_environment(config["environment_variables"])
        assert (settings.specs_bucket, settings.runs_bucket) == (stack.SPECS_BUCKET, stack.RUNS_BUCKET)
        assert settings.workflow == stack.WORKFLOW
        topics = (settings.requests_topic, settings.operations_topic, settings.job_events_topic)
        assert (*topics, settings.run_events_topic) == (*TOPICS, stack.RUN_EVENTS)
        assert settings.data_buckets == "datasets"
        assert settings.model_buckets == "other-runs"
        found = {role: getattr(settings, f"{role}_image") for role in OF_CONTAINERS_OF_RUNS}
        assert found == OF_CONTAINERS_OF_RUNS
        assert settings.trainer_service_account == f"dropforge-trainer@{PROJECT}.iam.gserviceaccount.com"
        in_cluster = ("kubernetes_namespace", "kubernetes_trainer_account", "kubernetes_server_account")
        assert [getattr(settings, name) for name in in_cluster] == [getattr(Settings, name) for name in in_cluster]
        assert policy_of(settings.policy) == policy_of(json.dumps(yaml.safe_load(POLICY)))
        assert (
            config["service_account_email"] == f"dropforge-{name.replace('_', '-')}@{PROJECT}.iam.gserviceaccount.com"
        )


def test_a_function_that_asks_endpoints_has_a_way_into_the_network(applied: Applied) -> None:
    asks = {"stages/deploy.py": "deploy", "stages/rollout/advance.py": "rollout"}  # the entry point of each module
    package = ROOT / "functions" / "dropforge"
    callers = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if " completion_problem(" in path.read_text()
    }
    assert callers == {*asks, "stages/completion.py"}
    for function in applied["google_cloudfunctions2_function"]:
        (config,) = function["service_config"]
        name = function["build_config"][0]["entry_point"]
        is_inside = config.get("direct_vpc_egress") == "VPC_EGRESS_PRIVATE_RANGES_ONLY"
        assert is_inside is bool(config.get("direct_vpc_network_interface")) is (name in asks.values()), name


def test_the_command_line_reads_its_settings(applied: Applied) -> None:
    content = tomllib.loads(applied["output"][0]["dropforge_toml"])
    environment = {f"DROPFORGE_{name.upper()}": value for name, value in content.items()}
    settings = Settings.from_environment(environment)
    assert settings.workflow_name.endswith(f"/workflows/{stack.WORKFLOW}")
    assert policy_of(settings.policy).max_cost_usd == 12.5
    assert settings.page_of("r-1") == f"{CONSOLE}/runs/r-1"
    assert applied["output"][0]["console_url"] == CONSOLE
    assert applied["output"][0]["console_cost"].startswith("$0 while no page is open")


def test_the_workflow_calls_the_urls_of_the_functions(applied: Applied) -> None:
    called = {
        "dropforge-run": {"provision", "inspect", "deploy", "teardown"},
        "dropforge-rollout": {"rollout"},
    }
    workflows = {workflow["name"]: workflow for workflow in applied["google_workflows_workflow"]}
    assert workflows.keys() == called.keys()
    urls = {function["url"] for function in applied[FUNCTION]}
    for name, workflow in workflows.items():
        source = f"{name.removeprefix('dropforge-')}.workflows.yaml"
        assert workflow["source_contents"] == (ROOT / "workflows" / source).read_text()
        assert {workflow["user_env_vars"]["FUNCTIONS_URL"] + function for function in called[name]} <= urls


def test_triggers_are_those_of_the_local_stack(applied: Applied) -> None:
    triggers = {}
    for trigger in applied["google_eventarc_trigger"]:
        filters = {criterion["attribute"]: criterion["value"] for criterion in trigger["matching_criteria"]}
        kind, transport = filters.pop("type"), trigger["transport"][0]["pubsub"][0]
        where = filters if filters else {"topic": transport["topic"]}
        service = trigger["destination"][0]["cloud_run_service"][0]["service"]
        name, function = (text.removeprefix("dropforge-").replace("-", "_") for text in (trigger["name"], service))
        triggers[name] = (function, kind, where)
    team = triggers.pop("on_request_search")
    assert team == ("on_spec_message", PUBLISHED, {"topic": f"projects/{PROJECT}/topics/{stack.REQUESTS}-search"})
    local = {trigger.name.replace("-", "_"): trigger[1:] for trigger in stack.triggers()}
    assert triggers == local


def test_each_topic_has_its_own_publishers(applied: Applied) -> None:
    granted = {(b["topic"], b["member"]) for b in applied["google_pubsub_topic_iam_member"] if ":ml" in b["member"]}
    assert granted == {
        (f"{stack.REQUESTS}-search", "group:ml@example.com"),
        (stack.OPERATIONS, "group:ml-ops@example.com"),
    }


def test_every_trigger_gets_a_dead_letter_topic(applied: Applied, directory: Path) -> None:
    commands = (directory / "gcloud.log").read_text().splitlines()
    topics = {match[1] for line in commands if (match := re.search(r"--dead-letter-topic=projects/\S+/(\S+)", line))}
    assert topics == {subscription["name"] for subscription in applied["google_pubsub_subscription"]}
    assert len(topics) == len(applied["google_eventarc_trigger"])


def test_accounts_hold_the_permissions_of_permissions_yaml(applied: Applied) -> None:
    roles = {
        f"projects/{PROJECT}/roles/{r['role_id']}": r["permissions"] for r in applied["google_project_iam_custom_role"]
    }
    held: dict[tuple[str, str], set[str]] = {}
    for kind, target in BINDINGS.items():
        for binding in applied[kind]:
            if binding["role"] in roles:
                account = binding["member"].removeprefix("serviceAccount:dropforge-").split("@")[0].replace("-", "_")
                held.setdefault((account, _where(binding, target)), set()).update(roles[binding["role"]])
    assert held == _expected()


def test_data_buckets_of_any_project_get_the_smallest_predefined_role(applied: Applied) -> None:
    """Google binds no custom role of a project on a bucket of another project."""
    roles = yaml.safe_load((ROOT / "tests" / "data" / "iam_predefined_roles.yaml").read_text())
    bindings = applied["google_storage_bucket_iam_member"]
    bound = {(b["member"], b["role"]) for b in bindings if b["bucket"] == "datasets"}
    expected = set()
    for name, account in permissions()["accounts"].items():
        for scope in ("data_buckets", "data_locations"):
            if needed := set(account["grants"].get(scope, ())):
                fitting = {role for role, held in roles.items() if needed <= set(held)}
                (smallest,) = {role for role in fitting if not any(set(roles[role]) > set(roles[r]) for r in fitting)}
                expected.add((f"serviceAccount:dropforge-{_id(name)}@{PROJECT}.iam.gserviceaccount.com", smallest))
    assert bound == expected
    custom = [role["role_id"] for role in applied["google_project_iam_custom_role"]]
    assert not [role for role in custom if "data_buckets" in role or "data_locations" in role]


def test_nobody_reads_the_keys_of_another_deployment(applied: Applied) -> None:
    """The functions that serve its models read its models and records, and nothing else of its runs bucket."""
    bindings = [b for b in applied["google_storage_bucket_iam_member"] if b["bucket"] == "other-runs"]
    place = "projects/_/buckets/other-runs/objects"
    below = f'resource.name.startsWith("{place}/models/") || resource.name.startsWith("{place}/runs/")'
    assert {b["condition"][0]["expression"] for b in bindings} == {below}
    assert {b["role"] for b in bindings} == {"roles/storage.objectViewer"}
    accounts = {b["member"].removeprefix("serviceAccount:dropforge-").split("@")[0] for b in bindings}
    assert accounts == {"on-spec-message", "rollout"}
    assert not [role for role in applied["google_project_iam_custom_role"] if "model_buckets" in role["role_id"]]


def test_a_rollout_writes_no_model_but_copies(applied: Applied) -> None:
    bindings = applied["google_storage_bucket_iam_member"]
    (copied,) = [b["condition"][0]["expression"] for b in bindings if b["role"].endswith("_rollout_copied_objects")]
    assert copied == f'resource.name.startsWith("projects/_/buckets/{stack.RUNS_BUCKET}/objects/models/copy--")'


def test_the_agents_of_services_are_created_before_they_are_needed(
    applied: Applied, directory: Path, graph: str
) -> None:
    """Without them, the first deployment in a new project is refused."""
    lines = (directory / "gcloud.log").read_text().splitlines()
    created = [line for line in lines if "services identity create" in line]
    services = re.findall(r"--service=(\w+)\.googleapis\.com", "".join(created))
    assert sorted(services) == ["eventarc", "iap", "pubsub", "workflows"]
    assert all(f"--project={PROJECT} " in line for line in created)
    granted = [line.partition("--member=")[2] for line in lines if "add-iam-policy-binding" in line]
    assert sorted(granted) == [
        f"serviceAccount:service-{NUMBER}@gcp-sa-{service}.iam.gserviceaccount.com --role=roles/{service}.serviceAgent"
        for service in ("eventarc", "pubsub", "workflows")
    ]
    assert (directory / "sleep.log").read_text().splitlines() == ["sleep 120"] * 3
    assert '"google_cloud_run_v2_service_iam_member.console" -> "terraform_data.iap_agent"' in graph
    for needs in (
        "google_workflows_workflow.run",
        "google_workflows_workflow.rollout",
        "google_eventarc_trigger.trigger",
        "google_pubsub_topic_iam_member.dead_letter",
    ):
        assert f'"{needs}" -> "terraform_data.agent"' in graph


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_accepts_the_commands_of_terraform(
    applied: Applied, directory: Path, tmp_path: Path, run_gcloud: RunGcloud
) -> None:
    commands = sorted(set((directory / "gcloud.log").read_text().splitlines()))
    assert refused(run_gcloud, commands, tmp_path) == {}


def test_the_budget_tells_the_addresses_of_alerts(applied: Applied) -> None:
    (budget,) = applied["google_billing_budget"]
    (rule,) = budget["all_updates_rule"]
    assert len(rule["monitoring_notification_channels"]) == len(VARIABLES["alert_emails"])


@pytest.mark.parametrize(
    ("changed", "told", "problem"),
    [
        ({"alert_emails": []}, False, None),
        ({"alert_emails": [f"{name}@example.com" for name in "abcde"]}, True, None),
        ({"alert_emails": [f"{name}@example.com" for name in "abcdef"]}, True, "at most 5 addresses"),
        ({"alert_emails": [f"{name}@example.com" for name in "abcdef"], "billing_account": ""}, False, None),
    ],
)
def test_a_budget_has_as_many_addresses_as_google_takes(
    applied: Applied, directory: Path, tmp_path: Path, changed: dict[str, Any], told: bool, problem: str | None
) -> None:
    assert applied, "the directory is initialized"
    copy = shutil.copytree(directory, tmp_path / "changed", symlinks=True)
    (copy / "terraform" / "test.auto.tfvars.json").write_text(json.dumps({**VARIABLES, **changed}))
    with serving(google()) as providers:
        if problem:
            with pytest.raises(AssertionError, match=problem):
                terraform(copy, "plan", "-input=false", providers=providers)
        else:
            target = "-target=google_billing_budget.project"
            plan = terraform(copy, "plan", "-input=false", "-state=none", target, providers=providers)
            assert ("all_updates_rule {" in plan) is told


def test_functions_are_called_by_one_account_each(applied: Applied) -> None:
    bindings = applied["google_cloud_run_v2_service_iam_member"]
    callers: dict[str, tuple[str, str]] = {}
    servers = f"serviceAccount:dropforge-server@{PROJECT}.iam.gserviceaccount.com"
    for b in bindings:
        if b["name"] == "dropforge-console":
            agent = f"serviceAccount:service-{NUMBER}@gcp-sa-iap.iam.gserviceaccount.com"
            assert (b["role"], b["member"]) == ("roles/run.invoker", agent)
        elif b["member"] == servers:
            assert (b["name"], b["role"]) == ("dropforge-access", "roles/run.invoker")
        else:
            callers[b["name"]] = (b["role"], b["member"])
    for name in entry_points():
        caller = permissions()["accounts"][name]["called_by"]
        member = f"serviceAccount:dropforge-{caller}@{PROJECT}.iam.gserviceaccount.com"
        assert callers.pop(f"dropforge-{name.replace('_', '-')}") == ("roles/run.invoker", member)
    assert callers == {}


def test_an_account_writes_its_own_objects_only(applied: Applied) -> None:
    runs = f"projects/_/buckets/{stack.RUNS_BUCKET}/objects"
    conditions = {b["role"].rsplit("/", 1)[1]: b["condition"] for b in applied["google_storage_bucket_iam_member"]}
    (event,) = conditions["dropforge_on_job_event_event_objects"]
    assert event["expression"].startswith(f'resource.name.startsWith("{runs}/runs/") && ')
    (lent,) = conditions["dropforge_access_lent_objects"]
    places = [f"{runs}/{prefix}/" for prefix in ("checkpoints", "models", "machines")]
    assert re.findall(r'startsWith\("([^"]*)"\)', lent["expression"]) == places
    (cache,) = conditions["dropforge_access_cache_objects"]
    assert cache["expression"] == f'resource.name.startsWith("{runs}/caches/")'


def test_the_console_reads_its_settings_and_scales_to_zero(applied: Applied) -> None:
    (service,) = applied["google_cloud_run_v2_service"]
    assert (service["name"], service["iap_enabled"]) == ("dropforge-console", True)
    (template,), (scaling,) = service["template"], service["template"][0]["scaling"]
    assert (scaling["min_instance_count"], scaling["max_instance_count"]) == (0, 1)
    assert int(template["timeout"].removesuffix("s")) > STREAM_SECONDS
    assert template["service_account"] == f"dropforge-console@{PROJECT}.iam.gserviceaccount.com"
    (container,) = template["containers"]
    assert container["image"] == IMAGES["console"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert Settings.from_environment(environment).console_topic == "dropforge-console"
    behind = Behind.from_environment(environment)
    assert f"https://{behind.host}" == CONSOLE
    assert behind.audience == f"/projects/{NUMBER}/locations/{REGION}/services/dropforge-console"
    assert behind.submitters == Members.of(VARIABLES["console_submitters"])
    assert behind.admins == Members.of(VARIABLES["console_admins"])


def test_everybody_who_has_a_role_in_the_console_passes_iap_and_nobody_else(applied: Applied) -> None:
    members = {b["member"] for b in applied["google_iap_web_cloud_run_service_iam_member"]}
    roles = ("console_viewers", "console_submitters", "console_admins")
    assert members == {member for role in roles for member in VARIABLES[role]}


def test_the_console_may_call_two_functions_and_no_other_service(applied: Applied) -> None:
    account = f"serviceAccount:dropforge-console@{PROJECT}.iam.gserviceaccount.com"
    called = {b["name"] for b in applied["google_cloud_run_v2_service_iam_member"] if b["member"] == account}
    assert called == {"dropforge-ask", "dropforge-preflight"}
    held = [role["permissions"] for role in applied["google_project_iam_custom_role"] if "_console_" in role["role_id"]]
    assert held
    assert not [permission for permissions in held for permission in permissions if "invoke" in permission]


def test_nobody_but_the_console_says_for_whom_it_asks(applied: Applied) -> None:
    """The functions believe the metadata below specs/console/, and the messages of the console's topic."""
    account = f"serviceAccount:dropforge-console@{PROJECT}.iam.gserviceaccount.com"
    publishers = {b["member"] for b in applied["google_pubsub_topic_iam_member"] if b["topic"] == "dropforge-console"}
    assert publishers == {account}
    roles = {
        f"projects/{PROJECT}/roles/{r['role_id']}": r["permissions"] for r in applied["google_project_iam_custom_role"]
    } | {"roles/storage.objectUser": ["storage.objects.create"], "roles/storage.objectViewer": []}
    names = (f"{CONSOLE_SPECS_PREFIX}a.json", "specs/a.json", "specs/consoles/a.json", "specs/console.json")
    writers: dict[str, set[str]] = {name: set() for name in names}
    for binding in applied["google_storage_bucket_iam_member"]:
        if binding["bucket"] == stack.SPECS_BUCKET and "storage.objects.create" in roles[binding["role"]]:
            condition = "".join(each["expression"] for each in binding.get("condition") or ())
            for name in names:
                resource = Resource(f"projects/_/buckets/{stack.SPECS_BUCKET}/objects/{name}")
                if not condition or compile_condition(condition)(resource):
                    writers[name].add(binding["member"])
    assert writers == {name: {account} if name == names[0] else {"group:ml@example.com"} for name in names}


RUN = "job-0123456789ab"
CONTROL_PLANE = (
    f"runs/open/{RUN}",
    f"runs/{RUN}/record.json",
    f"runs/{RUN}/spec.json",
    f"runs/{RUN}/events/0001-000000000000001-failed.json",
    f"runs/{RUN}/machine/attempt-1/status.json",
    "runs/open/machine/machine/y",
    f"runs/{RUN}/machine/record.json",
    f"runs/machines/{RUN}",
    f"runs/x/objects/machines/{RUN}",
)
OF_CONTAINERS = (
    f"machines/{RUN}/attempt-1/status.json",
    f"models/{RUN}/MANIFEST.json",
    f"checkpoints/{RUN}/step-1/x",
    f"caches/{RUN}/x.zip",
)


def test_no_container_may_write_what_the_control_plane_reads_as_its_own(applied: Applied) -> None:
    """The conditions of the account that lends them its token, evaluated for names that attacks have used.

    The containers' own accounts may neither write nor read anything in the runs bucket.
    """
    lender, trainer, server = (
        f"serviceAccount:dropforge-{name}@{PROJECT}.iam.gserviceaccount.com" for name in ("access", "trainer", "server")
    )
    own = {
        (b["member"], b["role"].rsplit("/", 1)[1])
        for b in applied["google_storage_bucket_iam_member"]
        if b["member"] in (trainer, server) and b["bucket"] == stack.RUNS_BUCKET
    }
    assert own == set()
    bindings = [
        b
        for b in applied["google_storage_bucket_iam_member"]
        if b["member"] == lender and not b["role"].endswith("_runs_bucket")
    ]
    assert {b["role"].rsplit("/", 1)[1] for b in bindings} == {
        "dropforge_access_lent_objects",
        "dropforge_access_cache_objects",
    }
    writable = {name for name in (*CONTROL_PLANE, *OF_CONTAINERS) if any(_allows(b, name) for b in bindings)}
    assert writable == set(OF_CONTAINERS)


def _allows(binding: dict[str, Any], name: str) -> bool:
    """Whether the condition of a binding holds for an object of the runs bucket."""
    (condition,) = binding["condition"]
    resource = f"projects/_/buckets/{stack.RUNS_BUCKET}/objects/{name}"
    clauses = [clause.split(" && ") for clause in condition["expression"].split(" || ")]
    return any(all(_holds(term, resource) for term in terms) for terms in clauses)


def _holds(term: str, resource: str) -> bool:
    """One term of a condition: https://cloud.google.com/iam/docs/conditions-attribute-reference#resource-name."""
    if match := re.fullmatch(r'resource\.name\.startsWith\("([^"]*)"\)', term):
        return resource.startswith(match[1])
    match = re.fullmatch(r'resource\.name\.extract\("([^"{]*)\{\w+\}([^"]*)"\) != ""', term)
    assert match, term
    return re.search(re.escape(match[1]) + "(.+?)" + re.escape(match[2]), resource) is not None


def test_the_manifest_for_clusters_grants_the_permissions_of_permissions_yaml(applied: Applied) -> None:
    objects = list(yaml.safe_load_all(applied["output"][0]["kubernetes_manifest"]))
    own = [o for o in objects if o["apiVersion"] in GATEWAY_API]
    assert own == [o for o in stack.cluster_objects() if o["apiVersion"] in GATEWAY_API], "the emulator takes these"
    for manifest in objects:
        if manifest not in own:
            kubernetes.check(manifest)
    roles = {o["metadata"]["name"].removeprefix("dropforge-"): o["rules"] for o in objects if o["kind"] == "Role"}
    for name, account in permissions()["accounts"].items():
        held = {
            "/".join(filter(None, (*r["apiGroups"], *r["resources"]))): r["verbs"] for r in roles.pop(_id(name), ())
        }
        assert held == account.get("kubernetes", {})
    assert roles == {}
    policies = [stored(o) for o in objects if o["kind"] == "NetworkPolicy"]
    assert policies == [stored(o) for o in stack.cluster_objects() if o["kind"] == "NetworkPolicy"]
    annotations = {
        o["metadata"]["name"]: o["metadata"]["annotations"] for o in objects if o["kind"] == "ServiceAccount"
    }
    email = f"dropforge-trainer@{PROJECT}.iam.gserviceaccount.com"
    assert annotations[Settings.kubernetes_trainer_account] == {"iam.gke.io/gcp-service-account": email}


def test_the_local_stack_reads_the_bindings_that_terraform_makes(applied: Applied) -> None:
    """Its reader of Terraform's files is not Terraform; agents of Google have names that only Google knows."""
    read = read_configuration(ROOT / "terraform", VARIABLES)
    ours = {(b.member, b.role, b.resource.rsplit("/", 1)[-1] or PROJECT, b.condition) for b in read.bindings}
    made = set()
    more = {
        "google_cloud_run_v2_service_iam_member": "name",
        "google_iap_web_cloud_run_service_iam_member": "cloud_run_service_name",
    }
    for kind, target in {**BINDINGS, **more}.items():
        for binding in applied[kind]:
            conditions = [condition["expression"] for condition in binding.get("condition") or ()]
            made.add((binding["member"], binding["role"], binding[target].rsplit("/", 1)[-1], "".join(conditions)))
    assert _without_agents(ours) == _without_agents(made)
    assert {name.rsplit("/", 1)[1]: set(held) for name, held in read.roles.items()} == {
        role["role_id"]: set(role["permissions"]) for role in applied["google_project_iam_custom_role"]
    }
    manifest = list(yaml.safe_load_all(applied["output"][0]["kubernetes_manifest"]))
    assert _verbs_by_user(read.cluster_objects) == _verbs_by_user(manifest)


def stored(policy: dict[str, Any]) -> dict[str, Any]:
    """A policy whose address ranges are in order: Terraform keeps a set of them."""
    spec = json.loads(json.dumps(policy["spec"]))
    for rule in spec.get("ingress", ()):
        rule["from"].sort(key=json.dumps)
    return {**policy, "spec": spec}


FUNCTION = "google_cloudfunctions2_function"
BINDINGS = {
    "google_dns_managed_zone_iam_member": "managed_zone",
    "google_artifact_registry_repository_iam_member": "repository",
    "google_project_iam_member": "project",
    "google_pubsub_topic_iam_member": "topic",
    "google_secret_manager_secret_iam_member": "secret_id",
    "google_service_account_iam_member": "service_account_id",
    "google_storage_bucket_iam_member": "bucket",
}


def _without_agents(bindings: set[tuple[str, str, str, str]]) -> set[tuple[str, str, str, str]]:
    """The bindings of accounts and people; a number that only Google knows has its placeholder."""
    return {
        (member, role, resource, condition.replace(NUMBER, "<data.google_project.project.number>"))
        for member, role, resource, condition in bindings
        if member.startswith(
            ("serviceAccount:dropforge-", f"serviceAccount:{PROJECT}.svc", "group:", "user:", "domain:")
        )
    }


def _verbs_by_user(objects: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    rules = {o["metadata"]["name"]: o["rules"] for o in objects if o["kind"] == "Role"}
    bound = [o for o in objects if o["kind"] == "RoleBinding"]
    return {o["subjects"][0]["name"]: rules[o["roleRef"]["name"]] for o in bound}


def _id(account: str) -> str:
    return account.replace("_", "-")


def _where(binding: dict[str, Any], target: str) -> str:
    """The resource of a binding and its condition, such as `local-project-dropforge-runs if run_objects`."""
    condition = binding.get("condition")
    resource: str = binding[target].rsplit("/", 1)[-1]
    return resource + (f" if {condition[0]['title']}" if condition else "")


def _expected() -> dict[tuple[str, str], set[str]]:
    where = {
        "project": [PROJECT],
        "clusters": [PROJECT],
        "own_clusters": [PROJECT],
        "tpus": [PROJECT],
        "traces": [PROJECT],
        "runs_bucket": [stack.RUNS_BUCKET],
        **{
            scope: [f"{stack.RUNS_BUCKET} if {scope}"]
            for scope in (
                "readable_objects",
                "key_objects",
                "run_objects",
                "endpoint_objects",
                "event_objects",
                "lent_objects",
                "cache_objects",
                "copied_objects",
            )
        },
        "specs_bucket": [stack.SPECS_BUCKET],
        "console_specs": [f"{stack.SPECS_BUCKET} if console_specs"],
        "console_topic": ["dropforge-console"],
        "data_buckets": [],  # predefined roles: see the tests of data_buckets and model_buckets
        "data_locations": [],
        "model_buckets": [],
        "run_events_topic": [stack.RUN_EVENTS],
        "job_events_topic": [stack.JOB_EVENTS],
        "training_secrets": ["hf-token"],
        "webhook_secrets": ["slack-webhook", "team-webhook"],
        "endpoint_keys": ["dropforge-endpoint-key"],
        "trainer_account": [f"dropforge-trainer@{PROJECT}.iam.gserviceaccount.com"],
        "nodes_account": [f"dropforge-nodes@{PROJECT}.iam.gserviceaccount.com"],
        "server_account": [f"dropforge-server@{PROJECT}.iam.gserviceaccount.com"],
        "registry": ["dropforge"],
        "dns_zone": ["dropforge-endpoints"],
    }
    expected: dict[tuple[str, str], set[str]] = {}
    for account, body in permissions()["accounts"].items():
        for scope, held in body["grants"].items():
            for target in where[scope]:
                expected.setdefault((account, target), set()).update(held)
    return expected
