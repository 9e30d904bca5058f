# The private zone with the names of endpoints on TPU VMs. Functions write its records; clients in the VPC resolve them.
# A zone costs 0.20 USD a month: https://cloud.google.com/dns/pricing

resource "google_dns_managed_zone" "endpoints" {
  count = var.endpoint_domain == "" ? 0 : 1

  name          = "${var.prefix}-endpoints"
  dns_name      = "${var.endpoint_domain}."
  description   = "Named endpoints of dropforge on TPU VMs."
  visibility    = "private"
  force_destroy = true # its records are of endpoints, which end with the functions

  private_visibility_config {
    networks {
      network_url = "projects/${var.project_id}/global/networks/${local.network}"
    }
  }

  depends_on = [google_compute_network.network, google_project_service.api]
}
