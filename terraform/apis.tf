# The APIs that the data sources below call. A data source that depended on all APIs would be read only during the apply
# whenever one API is added: everything that follows from it would be unknown in the plan, and replaced.
resource "google_project_service" "cloudresourcemanager" {
  service            = "cloudresourcemanager.googleapis.com"
  disable_on_destroy = false
}

resource "google_project_service" "storage" {
  service            = "storage.googleapis.com"
  disable_on_destroy = false
}

resource "google_project_service" "api" {
  for_each = toset(concat(local.has_console ? ["iap.googleapis.com"] : [], [
    "artifactregistry.googleapis.com",
    "billingbudgets.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudfunctions.googleapis.com",
    "cloudquotas.googleapis.com",
    "cloudscheduler.googleapis.com",
    "cloudtrace.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "dns.googleapis.com",
    "eventarc.googleapis.com",
    "eventarcpublishing.googleapis.com",
    "iam.googleapis.com",
    "iamcredentials.googleapis.com", # pods on GKE become their service account, and CI does (docs/ci.md)
    "logging.googleapis.com",
    "monitoring.googleapis.com",
    "policytroubleshooter.googleapis.com",
    "pubsub.googleapis.com",
    "run.googleapis.com",
    "secretmanager.googleapis.com",
    "serviceusage.googleapis.com", # `dropforge preflight` asks which APIs are enabled
    "sts.googleapis.com",          # the function `access` gets the tokens of the containers there
    "telemetry.googleapis.com",
    "tpu.googleapis.com",
    "workflowexecutions.googleapis.com",
    "workflows.googleapis.com",
  ]))

  service = each.key

  # Other users of the project may need the APIs too.
  disable_on_destroy = false

  # So whatever depends on this resource has every API.
  depends_on = [google_project_service.cloudresourcemanager, google_project_service.storage]
}

moved {
  from = google_project_service.api["cloudresourcemanager.googleapis.com"]
  to   = google_project_service.cloudresourcemanager
}

moved {
  from = google_project_service.api["storage.googleapis.com"]
  to   = google_project_service.storage
}

data "google_project" "project" {
  project_id = var.project_id

  depends_on = [google_project_service.cloudresourcemanager]
}
