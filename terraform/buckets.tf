resource "google_storage_bucket" "specs" {
  name                        = "${var.project_id}-${var.prefix}-specs"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 86400
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age = var.spec_days
    }
  }

  depends_on = [google_project_service.api]
}

# Records, ledgers and models stay until a user deletes them. Checkpoints are deleted: only the next attempt needs them.
resource "google_storage_bucket" "runs" {
  name                        = "${var.project_id}-${var.prefix}-runs"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 86400
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = var.checkpoint_days
      matches_prefix = ["checkpoints/"]
    }
  }

  # What servers compiled. The next start of a server compiles again and keeps it again.
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 30
      matches_prefix = ["caches/"]
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }

  depends_on = [google_project_service.api]
}

# The functions' source by content hash, and the sources for Cloud Build.
resource "google_storage_bucket" "build" {
  name                        = "${var.project_id}-${var.prefix}-build"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 30
      matches_prefix = ["source/"]
    }
  }

  depends_on = [google_project_service.api]
}
