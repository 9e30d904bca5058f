# Trainers and endpoints have a leg in this network (Direct VPC egress), and no address on the internet of their own.
# A subnetwork has the same name in every region, because the functions know it by that name alone.

locals {
  network    = var.network == null ? var.prefix : var.network.name
  subnetwork = var.network == null ? var.prefix : var.network.subnetwork
}

resource "google_compute_network" "network" {
  count = var.network == null ? 1 : 0

  name                    = var.prefix
  description             = "Trainers and endpoints of dropforge."
  auto_create_subnetworks = false

  depends_on = [google_project_service.api]
}

resource "google_compute_subnetwork" "region" {
  for_each = var.network == null ? var.subnetwork_ranges : {}

  name                       = var.prefix
  description                = "Trainers and endpoints of dropforge in ${each.key}."
  network                    = google_compute_network.network[0].id
  region                     = each.key
  ip_cidr_range              = each.value
  private_ip_google_access   = true
  private_ipv6_google_access = "DISABLE_GOOGLE_ACCESS"
}
