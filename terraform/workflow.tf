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
  depends_on = [google_project_service.api, terraform_data.agent, google_cloudfunctions2_function.function]
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

  depends_on = [google_project_service.api, terraform_data.agent, google_cloudfunctions2_function.function]
}
