# One account for each function and each container role. The other accounts call functions or build images.

locals {
  callers = {
    build     = "Builds the functions and the images."
    events    = "Eventarc: calls the functions that handle events."
    nodes     = "Nodes of clusters: pull images, write logs and metrics."
    scheduler = "Cloud Scheduler: calls the sweep."
  }
  descriptions = merge(local.callers, { for name, account in local.accounts : name => account.description })
}

resource "google_service_account" "account" {
  for_each = local.descriptions

  account_id   = "${var.prefix}-${replace(each.key, "_", "-")}"
  display_name = "${var.prefix} ${each.key}"
  description  = each.value

  depends_on = [google_project_service.api]
}
