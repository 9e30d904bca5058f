# The Cloud Billing budget warns hours late and stops nothing. limits.max_cost_usd of a spec stops a run.

resource "google_billing_budget" "project" {
  provider = google.billing
  count    = var.billing_account == "" ? 0 : 1

  billing_account = var.billing_account
  display_name    = "${var.prefix} ${var.project_id}"

  budget_filter {
    projects = ["projects/${data.google_project.project.number}"]
  }

  amount {
    specified_amount {
      units = tostring(var.monthly_budget)
    }
  }

  dynamic "threshold_rules" {
    for_each = [0.5, 0.9, 1.0]
    content {
      threshold_percent = threshold_rules.value
    }
  }

  threshold_rules {
    threshold_percent = 1.0
    spend_basis       = "FORECASTED_SPEND"
  }

  # Without addresses, Google tells the billing account's administrators and users.
  dynamic "all_updates_rule" {
    for_each = length(var.alert_emails) == 0 ? [] : [1]
    content {
      monitoring_notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]
    }
  }
}
