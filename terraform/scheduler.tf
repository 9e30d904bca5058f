resource "google_cloud_scheduler_job" "sweep" {
  name             = "${var.prefix}-sweep"
  region           = var.region
  description      = "Deletes orphans and expired endpoints, and restarts lost work."
  schedule         = var.sweep_schedule
  time_zone        = "Etc/UTC"
  attempt_deadline = "600s"

  retry_config {
    retry_count = 1
  }

  http_target {
    uri         = google_cloudfunctions2_function.function["sweep"].service_config[0].uri
    http_method = "POST"
    headers     = { "Content-Type" = "application/json" } # the default is octet-stream, which the function refuses
    body        = base64encode("{}")

    oidc_token {
      service_account_email = google_service_account.account["scheduler"].email
      audience              = google_cloudfunctions2_function.function["sweep"].service_config[0].uri
    }
  }
}
