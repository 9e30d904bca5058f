# One page of charts: runs, training, endpoints, functions, events and the sweep.

resource "google_monitoring_dashboard" "overview" {
  dashboard_json = templatefile("${path.module}/dashboard.json.tftpl", {
    prefix   = var.prefix
    workflow = google_workflows_workflow.run.name
  })

  depends_on = [google_logging_metric.log]
}
