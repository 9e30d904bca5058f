resource "google_workflows_workflow" "run" {
  name                = "${var.prefix}-run"
  region              = var.region
  description         = "One run of dropforge, from an accepted spec to a terminal state."
  service_account     = google_service_account.account["workflow"].id
  source_contents     = file("${path.module}/../workflows/run.workflows.yaml")
  user_env_vars       = { FUNCTIONS_URL = local.functions_url }
  call_log_level      = "LOG_ERRORS_ONLY"
  deletion_protection = var.deletion_protection

  # The functions first: they also serve executions of the workflow before, and older functions do not serve this one.
  depends_on = [google_project_service.api, terraform_data.workflows_agent, google_cloudfunctions2_function.function]
}

resource "google_workflows_workflow" "rollout" {
  name                = "${var.prefix}-rollout"
  region              = var.region
  description         = "One rollout of a named endpoint of dropforge."
  service_account     = google_service_account.account["workflow"].id
  source_contents     = file("${path.module}/../workflows/rollout.workflows.yaml")
  user_env_vars       = { FUNCTIONS_URL = local.functions_url }
  call_log_level      = "LOG_ERRORS_ONLY"
  deletion_protection = var.deletion_protection

  depends_on = [google_project_service.api, terraform_data.workflows_agent, google_cloudfunctions2_function.function]
}

# A project that never had a workflow has no service agent of Workflows, and the first workflow is refused for want of it
# (https://github.com/terraform-google-modules/terraform-google-bigquery/pull/226). The provider's own resource for
# service agents, google_project_service_identity, is in google-beta only. The agent belongs to the project: `destroy`
# leaves it.
resource "terraform_data" "workflows_agent" {
  triggers_replace = {
    agent   = "service-${data.google_project.project.number}@gcp-sa-workflows.iam.gserviceaccount.com"
    project = var.project_id
  }

  provisioner "local-exec" {
    command = join(" && ", [
      "gcloud beta services identity create --service=workflows.googleapis.com --project=${self.triggers_replace.project} --quiet",
      join(" ", [
        "gcloud projects add-iam-policy-binding ${self.triggers_replace.project} --condition=None --format=none --quiet",
        "--member=serviceAccount:${self.triggers_replace.agent} --role=roles/workflows.serviceAgent",
      ]),
    ])
  }

  depends_on = [google_project_service.api]
}
