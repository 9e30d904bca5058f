# Every alert has its section in docs/operations.md, under its key.

locals {
  _functions = "resource.type=\"cloud_run_revision\" AND resource.labels.service_name=~\"^${var.prefix}-\""

  log_metrics = {
    function_errors = {
      description = "Errors that functions log: malformed events, messages that could not be sent."
      filter      = "severity>=ERROR"
    }
    runs = {
      description = "Runs that entered a state: accepted, rejected, succeeded, failed, cancelled."
      filter      = "jsonPayload.stage=(\"submit\" OR \"notify\") AND jsonPayload.message=(\"accepted\" OR \"rejected\" OR \"succeeded\" OR \"failed\" OR \"cancelled\")"
      labels      = { state = "jsonPayload.message" }
    }
    sweep_findings = {
      description = "Warnings of the sweep: an orphan, or a resource that it could not list or delete."
      filter      = "jsonPayload.stage=\"sweep\" AND severity>=WARNING"
    }
    sweeps = {
      description = "Sweeps that completed."
      filter      = "jsonPayload.stage=\"sweep\" AND jsonPayload.message=\"swept\""
    }
    unfinished_ends = {
      description = "Failed tries to tear down or to end a run. The functions retry them without limit."
      filter      = "jsonPayload.stage=(\"teardown\" OR \"notify\") AND severity>=WARNING"
    }
  }

  _stage_label = { stage = "jsonPayload.stage" }

  _log_metric = "metric.type=\"logging.googleapis.com/user/${var.prefix}"
  _dead       = join(", ", [for subscription in google_pubsub_subscription.dead_letter : "\"${subscription.name}\""])

  # An alert is raised when the sum over all series exceeds the threshold within the window. With `at_least` it is raised
  # when the sum stays below that number; missing data count as 0.
  alerts = {
    dead_letters = {
      summary   = "Events that no function could handle are in a dead-letter topic"
      filter    = "metric.type=\"pubsub.googleapis.com/subscription/num_undelivered_messages\" AND resource.type=\"pubsub_subscription\" AND resource.labels.subscription_id=one_of(${local._dead})"
      aligner   = "ALIGN_MAX"
      window    = "300s"
      threshold = 0
      severity  = "ERROR"
    }
    execution_failed = {
      summary   = "A workflow execution failed by itself, so its run may have no end"
      filter    = "metric.type=\"workflows.googleapis.com/finished_execution_count\" AND resource.type=\"workflows.googleapis.com/Workflow\" AND resource.labels.workflow_id=\"${google_workflows_workflow.run.name}\" AND metric.labels.status=\"FAILED\""
      aligner   = "ALIGN_DELTA"
      window    = "300s"
      threshold = 0
      severity  = "ERROR"
    }
    function_errors = {
      summary   = "Functions log errors"
      filter    = "${local._log_metric}/function_errors\" AND resource.type=\"cloud_run_revision\""
      aligner   = "ALIGN_DELTA"
      window    = "900s"
      threshold = 5
      severity  = "WARNING"
    }
    machines_serving = {
      summary   = "More serving instances than max_machines"
      filter    = "metric.type=\"run.googleapis.com/container/instance_count\" AND resource.type=\"cloud_run_revision\" AND resource.labels.service_name=starts_with(\"df-\")"
      aligner   = "ALIGN_MAX"
      window    = "300s"
      threshold = var.max_machines
      severity  = "WARNING"
    }
    machines_training = {
      summary   = "More training executions than max_machines"
      filter    = "metric.type=\"run.googleapis.com/job/running_executions\" AND resource.type=\"cloud_run_job\" AND resource.labels.job_name=starts_with(\"df-\")"
      aligner   = "ALIGN_MAX"
      window    = "300s"
      threshold = var.max_machines
      severity  = "WARNING"
    }
    no_sweep = {
      summary  = "No sweep has completed for two hours"
      filter   = "${local._log_metric}/sweeps\" AND resource.type=\"cloud_run_revision\""
      aligner  = "ALIGN_DELTA"
      window   = "7200s"
      at_least = 1
      severity = "CRITICAL"
    }
    run_stuck = {
      summary   = "A run cannot be torn down, or cannot end"
      filter    = "${local._log_metric}/unfinished_ends\" AND resource.type=\"cloud_run_revision\""
      aligner   = "ALIGN_DELTA"
      window    = "1800s"
      threshold = 15
      severity  = "CRITICAL"
    }
    sweep_findings = {
      summary   = "The sweep found an orphan, or could not delete a resource"
      filter    = "${local._log_metric}/sweep_findings\" AND resource.type=\"cloud_run_revision\""
      aligner   = "ALIGN_DELTA"
      window    = "900s"
      threshold = 0
      severity  = "ERROR"
    }
  }
}

resource "google_logging_metric" "log" {
  for_each = local.log_metrics

  name        = "${var.prefix}/${each.key}"
  description = each.value.description
  filter      = "${local._functions} AND ${each.value.filter}"

  metric_descriptor {
    metric_kind = "DELTA"
    value_type  = "INT64"
    unit        = "1"
    dynamic "labels" {
      for_each = try(each.value.labels, local._stage_label)
      content {
        key         = labels.key
        description = "The field ${labels.value} of the log line."
      }
    }
  }

  label_extractors = { for label, field in try(each.value.labels, local._stage_label) : label => "EXTRACT(${field})" }

  depends_on = [google_project_service.api]
}

resource "google_monitoring_alert_policy" "alert" {
  for_each = local.alerts

  display_name          = "${var.prefix} ${each.key}"
  combiner              = "OR"
  severity              = each.value.severity
  notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]

  conditions {
    display_name = each.value.summary
    condition_threshold {
      filter                  = each.value.filter
      comparison              = can(each.value.at_least) ? "COMPARISON_LT" : "COMPARISON_GT"
      threshold_value         = can(each.value.at_least) ? each.value.at_least : each.value.threshold
      duration                = can(each.value.at_least) ? "300s" : "0s"
      evaluation_missing_data = can(each.value.at_least) ? "EVALUATION_MISSING_DATA_ACTIVE" : null
      aggregations {
        alignment_period     = each.value.window
        per_series_aligner   = each.value.aligner
        cross_series_reducer = "REDUCE_SUM"
      }
    }
  }

  documentation {
    subject   = "${each.value.summary} (${var.project_id})"
    content   = "${each.value.summary}. What to do: docs/operations.md, `${each.key}`."
    mime_type = "text/markdown"
  }

  alert_strategy {
    auto_close = "86400s"
  }

  depends_on = [google_logging_metric.log]
}

resource "google_monitoring_notification_channel" "email" {
  for_each = var.alert_emails

  display_name = "${var.prefix} ${each.key}"
  type         = "email"
  labels       = { email_address = each.key }

  depends_on = [google_project_service.api]
}
