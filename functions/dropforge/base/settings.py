"""The settings of a deployment: DROPFORGE_* environment variables, set by Terraform or by the local stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from .errors import DropforgeError
from .names import deployment_id


@dataclass(frozen=True)
class Settings:
    """One field per variable: `runs_bucket` is DROPFORGE_RUNS_BUCKET. Fields without a default are required."""

    project: str
    location: str
    specs_bucket: str
    runs_bucket: str
    workflow: str
    requests_topic: str
    job_events_topic: str
    run_events_topic: str
    train_trl_image: str
    serve_vllm_image: str
    trainer_service_account: str
    server_service_account: str
    train_maxtext_image: str = ""
    serve_vllm_tpu_image: str = ""
    train_ray_image: str = ""
    network: str = "default"
    subnetwork: str = "default"
    nodes_service_account: str = ""  # for nodes of clusters that runs create; "": no run may create a cluster
    gke_cluster: str = ""  # the standing cluster; it has the same name in every region
    kubernetes_namespace: str = "dropforge"
    kubernetes_trainer_account: str = "dropforge-trainer"
    kubernetes_server_account: str = "dropforge-server"
    slack_webhook_secret: str = ""
    endpoint_key_secret: str = ""  # the API key of endpoints that Google's IAM does not guard; "": no check
    check_interval_seconds: int = 300
    provision_deadline_seconds: int = 1800
    capacity_pause_seconds: int = 60  # after all placements were refused; doubles each time
    console_url: str = ""  # of the console, such as https://console.example.com; "": messages have no links to it
    token_command: str = ""  # prints an endpoint's token, given a run id; "": gcloud's commands print it
    otlp_endpoint: str = ""  # the base URL of the OTLP receiver that gets a trace of each run; "": no receiver
    operations_topic: str = ""  # the topic of operators, who may cancel any run
    console_topic: str = ""  # of the console's account, which says who requests; "": no console says that
    rollout_workflow: str = ""  # of named endpoints; "": specs with `serve.endpoint` are refused
    endpoint_domain: str = ""  # of the private zone with the names of endpoints on TPU VMs; "": they have no names
    endpoint_zone: str = ""  # the managed zone of that domain in Cloud DNS
    endpoint_drain_seconds: int = 305  # from a change of such a name until the machine before is deleted: 5 s + 300 s
    endpoint_gateways: str = ""  # regions whose cluster has a Gateway for named endpoints, separated by commas
    endpoint_settle_seconds: int = 60  # from new weights in a load balancer until each of its proxies has them
    data_buckets: str = ""  # separated by commas; "*" stands for any bucket, on the local stack
    model_buckets: str = ""  # separated by commas: runs buckets of other deployments, whose models may be served
    access_url: str = ""  # of the function `access`; "": containers use their own account for the runs bucket
    dead_letter_subscriptions: str = ""  # separated by commas: the events that no function could handle
    policy: str = ""  # JSON of the operator's policy (spec/policy.py); "": its defaults

    def has_gateway(self, region: str) -> bool:
        """Whether the cluster in a region has a Gateway for named endpoints."""
        return region in self.endpoint_gateways.split(",")

    @property
    def workflow_name(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/workflows/{self.workflow}"

    @property
    def rollout_workflow_name(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/workflows/{self.rollout_workflow}"

    def page_of(self, run: str) -> str:
        """The page of a run in the console; "" without a console."""
        return f"{self.console_url.rstrip('/')}/runs/{run}" if self.console_url else ""

    @property
    def deployment(self) -> str:
        """The value of the deployment label on all resources of this deployment's runs."""
        return deployment_id(self.runs_bucket)

    def reaches_all(self, topic: str) -> bool:
        """Whether the messages of a topic may change every run and endpoint: operators and the console send them."""
        return topic == self.operations_topic or (topic == self.console_topic and bool(topic))

    @property
    def other_buckets(self) -> list[str]:
        """The runs buckets of other deployments whose models may be served here."""
        return [bucket for bucket in self.model_buckets.split(",") if bucket]

    def topic(self, short_name: str) -> str:
        return f"projects/{self.project}/topics/{short_name}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises DropforgeError, which lists every missing or malformed variable."""
        values: dict[str, str | int] = {}
        problems = []
        for field in fields(cls):
            name = f"DROPFORGE_{field.name.upper()}"
            text = environment.get(name)
            if text is None:
                if field.default is MISSING:
                    problems.append(f"{name} is not set")
            elif field.type == "int":
                if not text.isdigit():
                    problems.append(f"{name} is {text!r}; expected a whole number of seconds")
                values[field.name] = int(text) if text.isdigit() else 0
            else:
                values[field.name] = text
        if problems:
            raise DropforgeError("; ".join(problems) + " (terraform/functions.tf and local/dropforge_local set them)")
        return cls(**values)  # type: ignore[arg-type]
