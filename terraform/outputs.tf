output "console_cost" {
  description = "What the console costs: it scales to zero."
  value       = local.has_console ? "$0 while no page is open; while one is, about $0.10 an hour on Cloud Run and $0.09 on Cloud Storage" : ""
}

output "console_url" {
  description = "Address of the console, which messages and the dropforge command link to; empty without a console."
  value       = local.console_url
}

output "dropforge_toml" {
  description = "Configuration of the dropforge command: terraform output -raw dropforge_toml > dropforge.toml"
  value       = join("", [for name, value in local.settings : "${name} = ${jsonencode(value)}\n"])
}

output "kubernetes_manifest" {
  description = "Kubernetes objects that every cluster needs, for kubectl apply; empty without cluster_regions."
  value       = length(var.cluster_regions) == 0 ? "" : join("---\n", [for object in local.kubernetes_objects : yamlencode(object)])
}

output "operations_topic" {
  description = "Topic to which operators publish cancel requests for any run."
  value       = google_pubsub_topic.operations.id
}

output "requests_topic" {
  description = "Topic to which other systems publish specs, and cancel requests for the runs of this topic."
  value       = google_pubsub_topic.requests.id
}

output "run_events_topic" {
  description = "Topic with an event for every state of every run, for other systems."
  value       = google_pubsub_topic.run_events.id
}

output "runs_bucket" {
  description = "Bucket of records, checkpoints and models."
  value       = google_storage_bucket.runs.name
}

output "service_accounts" {
  description = "E-mail of each service account, by its function, container role or caller."
  value       = { for name, account in google_service_account.account : name => account.email }
}

output "specs_bucket" {
  description = "Bucket into which specs are dropped, below specs/."
  value       = google_storage_bucket.specs.name
}

output "workflow" {
  description = "The workflow whose executions are the runs."
  value       = google_workflows_workflow.run.id
}
