# Only the names of secrets. `gcloud secrets versions add` adds a value, which never passes through Terraform.
# The names are exactly those in specs, so one spec works in every deployment.

resource "google_secret_manager_secret" "secret" {
  for_each = setunion(var.training_secrets, local.webhook_secrets, local.endpoint_keys)

  secret_id = each.key

  replication {
    auto {}
  }

  depends_on = [google_project_service.api]
}

locals {
  # On Cloud Run, IAM guards endpoints. Elsewhere vLLM checks this key.
  has_other_endpoints = length(var.cluster_regions) + length(var.tpu_regions) > 0
  endpoint_keys       = var.endpoint_key_secret == "" || !local.has_other_endpoints ? [] : [var.endpoint_key_secret]

  webhook_secrets = setunion(var.webhook_secrets, var.slack_webhook_secret == "" ? [] : [var.slack_webhook_secret])
}
