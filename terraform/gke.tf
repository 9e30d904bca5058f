# Optional: a standing Autopilot cluster in each region of cluster_regions. All have the same name, because the functions
# know one name. An Autopilot cluster without pods costs its management fee.

resource "google_container_cluster" "region" {
  for_each = var.cluster_regions

  name                = var.prefix
  description         = "Trains and serves runs of dropforge."
  location            = each.key
  enable_autopilot    = true
  deletion_protection = var.deletion_protection
  network             = local.network
  subnetwork          = local.subnetwork

  release_channel {
    channel = "REGULAR"
  }

  cluster_autoscaling {
    auto_provisioning_defaults {
      service_account = google_service_account.account["nodes"].email
      oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    }
  }

  # Nodes have no addresses on the internet; they reach it through the NAT of network.tf.
  private_cluster_config {
    enable_private_nodes = true
  }

  # The functions use the DNS endpoint, where IAM decides (container.clusters.connect). Access by IP address is off.
  control_plane_endpoints_config {
    dns_endpoint_config {
      allow_external_traffic = true
    }
    ip_endpoints_config {
      enabled = false
    }
  }

  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = true
    }
    ray_operator_config {
      enabled = true
      ray_cluster_logging_config {
        enabled = true
      }
      ray_cluster_monitoring_config {
        enabled = true
      }
    }
  }

  # The controller of Gateways (kubernetes.tf): https://cloud.google.com/kubernetes-engine/docs/how-to/deploying-gateways
  dynamic "gateway_api_config" {
    for_each = contains(keys(var.endpoint_gateway), each.key) ? ["CHANNEL_STANDARD"] : []
    content {
      channel = gateway_api_config.value
    }
  }

  ip_allocation_policy {}

  depends_on = [
    google_artifact_registry_repository_iam_member.nodes,
    google_compute_subnetwork.region,
    google_project_iam_member.nodes,
    google_project_service.api,
  ]
}

resource "google_project_iam_member" "nodes" {
  project = var.project_id
  role    = "roles/container.defaultNodeServiceAccount"
  member  = google_service_account.account["nodes"].member
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  repository = google_artifact_registry_repository.images.name
  location   = google_artifact_registry_repository.images.location
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.account["nodes"].member
}
