# Every entry point of functions/main.py, from one archive whose name changes with its content.

locals {
  functions     = { for name, account in local.accounts : name => account if can(account.called_by) }
  functions_url = "https://${var.region}-${var.project_id}.cloudfunctions.net/${var.prefix}-"

  # Keys are fields of functions/dropforge/base/settings.py. The fields of images come from var.images.
  settings = merge(local._settings, { for role, image in var.images : "${role}_image" => image if role != "console" })
  _settings = {
    project                    = var.project_id
    location                   = var.region
    specs_bucket               = google_storage_bucket.specs.name
    runs_bucket                = google_storage_bucket.runs.name
    data_buckets               = join(",", var.data_buckets)
    model_buckets              = join(",", var.model_buckets)
    workflow                   = "${var.prefix}-run"
    requests_topic             = google_pubsub_topic.requests.name
    operations_topic           = google_pubsub_topic.operations.name
    job_events_topic           = google_pubsub_topic.job_events.name
    rollout_workflow           = "${var.prefix}-rollout"
    run_events_topic           = google_pubsub_topic.run_events.name
    trainer_service_account    = google_service_account.account["trainer"].email
    server_service_account     = google_service_account.account["server"].email
    network                    = local.network
    subnetwork                 = local.subnetwork
    nodes_service_account      = length(var.ephemeral_cluster_regions) == 0 ? "" : google_service_account.account["nodes"].email
    gke_cluster                = length(var.cluster_regions) == 0 ? "" : var.prefix
    kubernetes_namespace       = var.prefix
    kubernetes_trainer_account = "${var.prefix}-trainer"
    kubernetes_server_account  = "${var.prefix}-server"
    slack_webhook_secret       = var.slack_webhook_secret
    endpoint_domain            = var.endpoint_domain
    endpoint_zone              = var.endpoint_domain == "" ? "" : google_dns_managed_zone.endpoints[0].name
    endpoint_gateways          = join(",", keys(var.endpoint_gateway))
    endpoint_key_secret        = local.has_other_endpoints ? var.endpoint_key_secret : ""
    console_url                = local.console_url
    console_topic              = local.has_console ? google_pubsub_topic.console["console"].name : ""
    otlp_endpoint              = var.otlp_endpoint
    access_url                 = "${local.functions_url}access"
    dead_letter_subscriptions  = join(",", local.dead_letters)
    policy                     = local.policy
  }

  # The functions that request completions of endpoints.
  _ask_endpoints = ["deploy", "rollout"]

  # By caller. Cloud Workflows and containers may reach a function's address from outside of the network.
  _ingress = {
    console  = "ALLOW_ALL" # the console is outside of the network
    trainer  = var.access_ingress
    workflow = var.workflow_ingress
  }

  # The operator's policy limits what specs may use (docs/policy.md). `make deploy` checks the file before it plans.
  policy = fileexists("${path.module}/policy.yaml") ? jsonencode(yamldecode(file("${path.module}/policy.yaml"))) : ""
}

data "archive_file" "functions" {
  type             = "zip"
  source_dir       = "${path.module}/../functions"
  excludes         = ["**/__pycache__/**"]
  output_path      = "${path.module}/../build/functions.zip"
  output_file_mode = "0644"
}

resource "google_storage_bucket_object" "functions" {
  name   = "${var.prefix}-functions/${data.archive_file.functions.output_sha256}.zip"
  bucket = google_storage_bucket.build.name
  source = data.archive_file.functions.output_path
}

resource "google_cloudfunctions2_function" "function" {
  for_each = local.functions

  name        = "${var.prefix}-${replace(each.key, "_", "-")}"
  location    = var.region
  description = each.value.description

  build_config {
    runtime         = "python311"
    entry_point     = each.key
    service_account = google_service_account.account["build"].id
    # Not the platform's own repository: the build account cannot get permissions on it before it exists.
    docker_repository = google_artifact_registry_repository.images.id

    source {
      storage_source {
        bucket = google_storage_bucket.build.name
        object = google_storage_bucket_object.functions.name
      }
    }
  }

  service_config {
    available_memory      = "512Mi"
    timeout_seconds       = 540
    max_instance_count    = var.max_function_instances
    ingress_settings      = lookup(local._ingress, each.value.called_by, "ALLOW_INTERNAL_ONLY")
    service_account_email = google_service_account.account[each.key].email
    # Endpoints on GKE and on TPU VMs have addresses only in the network. These functions request completions there.
    direct_vpc_egress = contains(local._ask_endpoints, each.key) && length(local.private_regions) > 0 ? "VPC_EGRESS_PRIVATE_RANGES_ONLY" : null

    dynamic "direct_vpc_network_interface" {
      for_each = contains(local._ask_endpoints, each.key) && length(local.private_regions) > 0 ? [local.subnetwork] : []
      content {
        network    = local.network
        subnetwork = direct_vpc_network_interface.value
      }
    }

    environment_variables = {
      for name, value in local.settings : "DROPFORGE_${upper(name)}" => value
    }
  }

  lifecycle {
    precondition {
      condition     = length(setsubtract(["serve_vllm", "train_trl"], keys(var.images))) == 0
      error_message = "There are no images yet: run `make images`, which builds them and stores their digests."
    }
    precondition {
      condition     = length(local.policy) <= 16384 # MAX_POLICY_BYTES of functions/dropforge/spec/policy.py
      error_message = "policy.yaml has ${length(local.policy)} characters as JSON; a function's setting holds 16384. Use patterns in place of long lists."
    }
    postcondition {
      condition     = !contains(keys(local._ingress), each.value.called_by) || self.url == "${local.functions_url}${each.key}"
      error_message = "Its callers call ${local.functions_url}${each.key}, but the function is at ${self.url}."
    }
  }

  depends_on = [
    google_artifact_registry_repository_iam_member.build,
    google_compute_subnetwork.region,
    google_project_iam_member.build,
    google_project_iam_member.build_source,
    google_storage_bucket_iam_member.build,
  ]
}

# Servers read their run's model by a token of `access`, as trainers do. On TPU VMs they also write their log and status.
resource "google_cloud_run_v2_service_iam_member" "server" {
  name     = google_cloudfunctions2_function.function["access"].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.account["server"].member
}

# Only these accounts may call functions. Each account may call only the functions that it needs.
resource "google_cloud_run_v2_service_iam_member" "caller" {
  for_each = local.functions

  name     = google_cloudfunctions2_function.function[each.key].name
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.account[each.value.called_by].member
}
