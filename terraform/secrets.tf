# Only the names of secrets. `gcloud secrets versions add` adds a value, which never passes through Terraform.
# The names are exactly those in specs, so one spec works in every deployment.

resource "google_secret_manager_secret" "secret" {
  for_each = setunion(var.training_secrets, local.webhook_secrets)

  secret_id = each.key

  replication {
    auto {}
  }

  depends_on = [google_project_service.api]
}

locals {
  webhook_secrets = setunion(var.webhook_secrets, var.slack_webhook_secret == "" ? [] : [var.slack_webhook_secret])
}
