variable "access_ingress" {
  description = "Ingress of the function `access`, which containers call; IAM decides in any case. Cloud Run jobs send calls of public addresses past the network, so ALLOW_INTERNAL_ONLY needs another route."
  type        = string
  default     = "ALLOW_ALL"

  validation {
    condition     = contains(["ALLOW_ALL", "ALLOW_INTERNAL_ONLY"], var.access_ingress)
    error_message = "Expected ALLOW_ALL or ALLOW_INTERNAL_ONLY."
  }
}

variable "alert_emails" {
  description = "E-mail addresses that receive alerts and Cloud Billing budget notifications: at most 5 with billing_account."
  type        = set(string)
  default     = []

  # https://cloud.google.com/billing/docs/reference/budget/rest/v1/billingAccounts.budgets (monitoringNotificationChannels)
  validation {
    condition     = var.billing_account == "" || length(var.alert_emails) <= 5
    error_message = "A Cloud Billing budget tells at most 5 addresses, and alert_emails has ${length(var.alert_emails)}. Give the address of a group, or no billing_account."
  }
}

variable "billing_account" {
  description = "Billing account of the project, for the Cloud Billing budget; empty: no budget. The user who applies needs billing.budgets.create on it."
  type        = string
  default     = ""
}

variable "checkpoint_days" {
  description = "Days before a checkpoint is deleted. Must be at least as long as a run may take."
  type        = number
  default     = 14
}

variable "client_ranges" {
  description = "Address ranges whose clients may call endpoints on GKE. They reach the load balancer only from inside the network. The default is every private range."
  type        = set(string)
  default     = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]

  validation {
    condition     = alltrue([for range in var.client_ranges : can(cidrhost(range, 0))])
    error_message = "Every range must be written as in 10.0.0.0/8."
  }
}

variable "cluster_regions" {
  description = "Regions with a standing GKE Autopilot cluster, for targets gke and ray. Each cluster costs its management fee."
  type        = set(string)
  default     = []
}

variable "console_admins" {
  description = "IAM members who in the console may also cancel every run and change named endpoints, such as user:ann@example.com or domain:example.com."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.console_admins : can(regex("^(user|serviceAccount|domain):[^,:]+$", member))])
    error_message = "Give user:EMAIL, serviceAccount:EMAIL or domain:DOMAIN: Identity-Aware Proxy tells the console no groups."
  }
}

variable "console_submitters" {
  description = "IAM members who in the console may also drop specs and cancel the runs of the specs bucket, such as user:ann@example.com or domain:example.com."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.console_submitters : can(regex("^(user|serviceAccount|domain):[^,:]+$", member))])
    error_message = "Give user:EMAIL, serviceAccount:EMAIL or domain:DOMAIN: Identity-Aware Proxy tells the console no groups."
  }
}

variable "console_url" {
  description = "Address of a console of this deployment, which messages and `dropforge status` link to, such as https://console.example.com; empty: the address of the service of the console, if there is one."
  type        = string
  default     = ""

  validation {
    condition     = var.console_url == "" || can(regex("^https://[^/]+[^/]$", var.console_url))
    error_message = "Give the address alone, such as https://console.example.com: dropforge appends the path of a page."
  }
}

variable "console_viewers" {
  description = "IAM members who may look at the console, such as group:ml@example.com. Without viewers, submitters and admins there is no console."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.console_viewers : can(regex("^(user|group|serviceAccount|domain|principal|principalSet):[^,]+$", member))])
    error_message = "Give members such as group:ml@example.com; IAM's names for everybody are refused."
  }
}

variable "data_buckets" {
  description = "Buckets that specs may name as gs:// sources, and from which specs may be read. Trainers may read them. A bucket may belong to another project; the user who applies needs storage.buckets.setIamPolicy on it."
  type        = set(string)
  default     = []
}

variable "deletion_protection" {
  description = "Whether Terraform refuses to delete the workflow and the clusters."
  type        = bool
  default     = true
}

variable "endpoint_domain" {
  description = "Domain of the private DNS zone with the names of endpoints on TPU VMs, such as models.example.internal. Only clients in the VPC resolve it. The zone costs 0.20 USD a month; empty: no zone, and specs with such an endpoint are refused."
  type        = string
  default     = ""

  validation {
    condition     = var.endpoint_domain == "" || can(regex("^[a-z][a-z0-9]*(\\.[a-z][a-z0-9]*)+$", var.endpoint_domain)) && length(var.endpoint_domain) <= 63
    error_message = "The endpoint_domain must have two labels of lower-case letters and digits at least, and 63 characters at most."
  }
}

variable "endpoint_gateway" {
  description = "Range of the proxy-only subnetwork in each region of cluster_regions whose named endpoints are behind a Gateway, such as {us-central1 = \"10.129.0.0/23\"}. A model behind a Gateway may get a share of the requests (serve.canary). Give a range that nothing else uses; with `network`, that of the proxy-only subnetwork that you have made."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for range in values(var.endpoint_gateway) : can(cidrhost(range, 0)) && try(tonumber(split("/", range)[1]) <= 26, false)])
    error_message = "Every range must be written as in 10.129.0.0/23, with 64 addresses at least."
  }
}

variable "endpoint_key_secret" {
  description = "Secret with the API key that endpoints on GKE and TPU VMs demand; empty: every client of the network may call them. It needs a version before a spec with such an endpoint is accepted."
  type        = string
  default     = "dropforge-endpoint-key"
}

variable "ephemeral_cluster_regions" {
  description = "Regions in which attempts may create their own clusters (target.cluster.create). Functions may then create and delete clusters, and act in every cluster of the project: use a separate project."
  type        = set(string)
  default     = []
}

variable "images" {
  description = "Image of each container role, by digest. `make images` builds the images, and tools/deploy.sh reads their digests."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for image in values(var.images) : can(regex("@sha256:[0-9a-f]{64}$", image))])
    error_message = "Every image must be given by its digest: host/project/repository/name@sha256:..."
  }
}

variable "max_delivery_attempts" {
  description = "Deliveries of an event before it moves to its dead-letter topic. With growing pauses, 20 deliveries take about three hours."
  type        = number
  default     = 20

  validation {
    condition     = var.max_delivery_attempts >= 5 && var.max_delivery_attempts <= 100
    error_message = "Pub/Sub allows 5 to 100 delivery attempts."
  }
}

variable "max_function_instances" {
  description = "Maximum number of instances of each function. An instance handles one request at a time."
  type        = number
  default     = 20
}

variable "max_machines" {
  description = "More training executions or serving instances than this at once raise an alert. The Cloud Billing budget lags by hours."
  type        = number
  default     = 10
}

variable "model_buckets" {
  description = "Runs buckets of other deployments whose models may be served here (docs/endpoints.md). Whoever may write models there decides what answers here. A bucket may belong to another project; the user who applies needs storage.buckets.setIamPolicy on it."
  type        = set(string)
  default     = []
}

variable "monthly_budget" {
  description = "Cloud Billing budget for the project, in whole units of the billing account's currency a month. It warns and stops nothing."
  type        = number
  default     = 500
}

variable "network" {
  description = "An existing network and its subnetwork, which must have that name in every region used; null: Terraform creates both."
  type = object({
    name       = string
    subnetwork = string
  })
  default = null
}

variable "operators" {
  description = "IAM members who may cancel any run, such as group:oncall@example.com. Others cancel by deleting the spec, or through the topic of their request."
  type        = set(string)
  default     = []
}

variable "otlp_endpoint" {
  description = "Base URL of an OTLP receiver that gets a trace of each run: https://telemetry.googleapis.com is Cloud Trace of this project; empty: no traces."
  type        = string
  default     = ""

  validation {
    condition     = var.otlp_endpoint == "" || can(regex("^https?://[^/]+[^/]$", var.otlp_endpoint))
    error_message = "Give the base URL alone, such as https://telemetry.googleapis.com: dropforge appends /v1/traces."
  }
}

variable "prefix" {
  description = "Prefix of every name. Two deployments in one project need two prefixes."
  type        = string
  default     = "dropforge"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,10}[a-z0-9]$", var.prefix))
    error_message = "The prefix must be 3 to 12 lower-case letters, digits and hyphens: service accounts have at most 30 characters."
  }
}

variable "project_id" {
  description = "Id of the project for all resources."
  type        = string
}

variable "region" {
  description = "Region of the buckets, the functions and the workflow. Specs choose the regions for training and serving."
  type        = string
}

variable "request_topics" {
  description = "More topics for requests, each with the IAM members who may publish there. Idempotency keys and cancel requests of a topic reach no run of another topic."
  type        = map(set(string))
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.request_topics) : can(regex("^[a-z][a-z0-9-]{0,19}$", name))])
    error_message = "The name of a topic has at most 20 lower-case letters, digits and dashes, and begins with a letter."
  }
}

variable "slack_webhook_secret" {
  description = "Secret with the Slack webhook that receives messages about every run and every rejected spec; empty: no messages."
  type        = string
  default     = ""
}

variable "soft_delete_days" {
  description = "Days in which a deleted or overwritten object can be restored. The object, including a checkpoint, costs money until then."
  type        = number
  default     = 7

  validation {
    condition     = var.soft_delete_days == 0 || (var.soft_delete_days >= 7 && var.soft_delete_days <= 90)
    error_message = "Cloud Storage keeps deleted objects for 7 to 90 days, or not at all (0)."
  }
}

variable "spec_days" {
  description = "Days before a spec is deleted from the specs bucket; runs keep their own copy. Must be longer than a run may take: deleting a spec cancels its run."
  type        = number
  default     = 90
}

variable "submitters" {
  description = "IAM members who may drop specs and follow their runs, such as group:ml@example.com."
  type        = set(string)
  default     = []
}

variable "subnetwork_ranges" {
  description = "Address range of the subnetwork in each region that specs may name. The default regions are those where Cloud Run has GPUs."
  type        = map(string)
  default = {
    asia-south1     = "10.64.0.0/20"
    asia-southeast1 = "10.64.16.0/20"
    europe-west1    = "10.64.32.0/20"
    europe-west4    = "10.64.48.0/20"
    us-central1     = "10.64.64.0/20"
    us-east4        = "10.64.80.0/20"
  }

  validation {
    condition = var.network != null || length(setsubtract(
      setunion(local.private_regions, length(local.private_regions) == 0 ? [] : [var.region]),
      keys(var.subnetwork_ranges)
    )) == 0
    error_message = "With cluster_regions, ephemeral_cluster_regions or tpu_regions, subnetwork_ranges must have a range for each of them, and for region."
  }
}

variable "sweep_schedule" {
  description = "Schedule of the sweep, as a cron expression in UTC. An endpoint may outlive its ttl by the interval."
  type        = string
  default     = "*/15 * * * *"
}

variable "tpu_regions" {
  description = "Regions in which specs may train or serve on TPU VMs. Each gets a NAT gateway, because the machines have no address on the internet."
  type        = set(string)
  default     = []
}

variable "training_secrets" {
  description = "Secrets that specs may pass to training containers, such as hf-token."
  type        = set(string)
  default     = []
}

variable "webhook_secrets" {
  description = "Secrets of channels that specs may name (webhooks, tokens, mail servers), in addition to slack_webhook_secret."
  type        = set(string)
  default     = []
}

variable "workflow_ingress" {
  description = "Ingress of the functions that the workflow calls; IAM decides in any case. See docs/security.md before ALLOW_INTERNAL_ONLY."
  type        = string
  default     = "ALLOW_ALL"

  validation {
    condition     = contains(["ALLOW_ALL", "ALLOW_INTERNAL_ONLY"], var.workflow_ingress)
    error_message = "Expected ALLOW_ALL or ALLOW_INTERNAL_ONLY."
  }
}
