# The console: one Cloud Run service behind Identity-Aware Proxy (IAP), which scales to zero. It exists if somebody may
# look: console_viewers, console_submitters or console_admins.

locals {
  console_members = setunion(var.console_viewers, var.console_submitters, var.console_admins)
  has_console     = length(local.console_members) > 0
  console         = local.has_console ? toset(["console"]) : toset([])
  console_service = "${var.prefix}-console"

  # By names alone: the service has this address before it exists, so that its settings can have the address, too.
  # https://docs.cloud.google.com/run/docs/triggering/https-request#deterministic
  _console_address = "https://${local.console_service}-${data.google_project.project.number}.${var.region}.run.app"
  console_url      = var.console_url == "" && local.has_console ? local._console_address : var.console_url

  # Besides the settings of the functions: console/dropforge_console/iap.py. The audience is that of IAP's assertions
  # (https://cloud.google.com/iap/docs/signed-headers-howto).
  _console_settings = {
    console_audience      = "/projects/${data.google_project.project.number}/locations/${var.region}/services/${local.console_service}"
    console_submitters    = join(",", var.console_submitters)
    console_admins        = join(",", var.console_admins)
    console_ask_url       = "${local.functions_url}ask"
    console_preflight_url = "${local.functions_url}preflight"
  }
  _iap_agent = "service-${data.google_project.project.number}@gcp-sa-iap.iam.gserviceaccount.com"
}

# Only the console's account may publish here: its messages say for which person it asks.
resource "google_pubsub_topic" "console" {
  for_each = local.console

  name = "${var.prefix}-console"

  depends_on = [google_project_service.api]
}

resource "google_cloud_run_v2_service" "console" {
  for_each = local.console

  name                = "${var.prefix}-console"
  location            = var.region
  description         = "The console of dropforge: runs, curves, endpoints and cost."
  ingress             = "INGRESS_TRAFFIC_ALL"
  iap_enabled         = true
  deletion_protection = false

  template {
    service_account = google_service_account.account["console"].email
    # A page's stream ends by itself after 15 minutes (STREAM_SECONDS of console/dropforge_console/live.py).
    timeout                          = "960s"
    max_instance_request_concurrency = 500

    scaling {
      min_instance_count = 0
      max_instance_count = 1 # one reader of the runs bucket for all viewers
    }

    containers {
      image = lookup(var.images, "console", "")

      resources {
        limits            = { cpu = "1", memory = "1Gi" }
        cpu_idle          = true # billed only while a request is open
        startup_cpu_boost = true
      }

      dynamic "env" {
        for_each = merge(local.settings, local._console_settings)
        content {
          name  = "DROPFORGE_${upper(env.key)}"
          value = env.value
        }
      }
    }
  }

  lifecycle {
    precondition {
      condition     = contains(keys(var.images), "console")
      error_message = "There is no image of the console yet: run `make images`, which builds it."
    }
  }

  depends_on = [google_project_service.api]
}

# Whoever passes IAP reaches the service through IAP's own account, and nobody reaches the service in another way.
resource "google_cloud_run_v2_service_iam_member" "console" {
  for_each = local.console

  name     = google_cloud_run_v2_service.console[each.key].name
  location = var.region
  role     = "roles/run.invoker"
  member   = "serviceAccount:${local._iap_agent}"

  depends_on = [terraform_data.iap_agent]
}

resource "google_iap_web_cloud_run_service_iam_member" "viewer" {
  for_each = local.console_members

  project                = var.project_id
  location               = var.region
  cloud_run_service_name = google_cloud_run_v2_service.console["console"].name
  role                   = "roles/iap.httpsResourceAccessor"
  member                 = each.key
}

# A project that never used IAP has no service agent of IAP (agents.tf). The agent belongs to the project: `destroy` leaves
# it.
resource "terraform_data" "iap_agent" {
  for_each = local.console

  triggers_replace = {
    agent   = local._iap_agent
    project = var.project_id
  }

  provisioner "local-exec" {
    command = "gcloud beta services identity create --service=iap.googleapis.com --project=${self.triggers_replace.project} --quiet"
  }

  depends_on = [google_project_service.api]
}
