# Trainers and endpoints are in this network (Direct VPC egress) and have no addresses on the internet.
# The subnetwork has the same name in every region, because the functions know one name.

locals {
  network    = var.network == null ? var.prefix : var.network.name
  subnetwork = var.network == null ? var.prefix : var.network.subnetwork

  # Regions whose machines have no address on the internet.
  private_regions = setunion(var.cluster_regions, var.ephemeral_cluster_regions, var.tpu_regions)
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

# The proxies of the load balancers of Gateways: https://cloud.google.com/load-balancing/docs/proxy-only-subnets
# A network has one such subnetwork in a region.
resource "google_compute_subnetwork" "proxies" {
  for_each = var.network == null ? var.endpoint_gateway : {}

  name          = "${var.prefix}-proxies"
  description   = "Proxies of load balancers in ${each.key}."
  network       = google_compute_network.network[0].id
  region        = each.key
  ip_cidr_range = each.value
  purpose       = "REGIONAL_MANAGED_PROXY"
  role          = "ACTIVE"
}

# Nodes of clusters and TPU VMs have no address on the internet; models and data sets come from the Hugging Face Hub.
resource "google_compute_router" "region" {
  for_each = var.network == null ? local.private_regions : []

  name    = var.prefix
  region  = each.key
  network = google_compute_network.network[0].id
}

resource "google_compute_router_nat" "region" {
  for_each = google_compute_router.region

  name                               = var.prefix
  router                             = each.value.name
  region                             = each.value.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

# Lets the whole network reach endpoints on TPU VMs. GKE creates its own rules.
resource "google_compute_firewall" "servers" {
  count = var.network == null && length(var.tpu_regions) > 0 ? 1 : 0

  name          = "${var.prefix}-servers"
  description   = "Requests to endpoints on TPU VMs."
  network       = google_compute_network.network[0].id
  source_ranges = values(var.subnetwork_ranges)
  target_tags   = ["dropforge-server"] # functions/dropforge/cloud/tpu.py

  allow {
    protocol = "tcp"
    ports    = ["8000"]
  }
}
