resource "google_artifact_registry_repository" "images" {
  repository_id = var.prefix
  description   = "Training and serving images of dropforge; deployments refer to them by digest."
  location      = var.region
  format        = "DOCKER"

  cleanup_policies {
    id     = "keep-recent"
    action = "KEEP"
    most_recent_versions {
      keep_count = 10
    }
  }

  cleanup_policies {
    id     = "delete-old"
    action = "DELETE"
    condition {
      older_than = "7776000s" # 90 days
    }
  }

  depends_on = [google_project_service.api]
}

# Only what `make images` needs, and a right that a build of functions needs: granted now, it holds everywhere when
# `make deploy` begins to build them. `make registry` applies only this.
resource "terraform_data" "registry" {
  depends_on = [
    google_artifact_registry_repository.images,
    google_artifact_registry_repository_iam_member.build,
    google_project_iam_member.build,
    google_project_iam_member.build_source,
    google_storage_bucket_iam_member.build,
  ]
}

resource "google_artifact_registry_repository_iam_member" "build" {
  repository = google_artifact_registry_repository.images.name
  location   = google_artifact_registry_repository.images.location
  role       = "roles/artifactregistry.writer"
  member     = google_service_account.account["build"].member
}

resource "google_project_iam_member" "build" {
  project = var.project_id
  role    = "roles/logging.logWriter"
  member  = google_service_account.account["build"].member
}

# To read the uploaded source. The bucket also has the functions' source, which `make deploy` trusts, so it does not write.
resource "google_storage_bucket_iam_member" "build" {
  bucket = google_storage_bucket.build.name
  role   = "roles/storage.objectViewer"
  member = google_service_account.account["build"].member
}

# Before a build, Cloud Functions copies the source of a function to its own bucket.
resource "google_project_iam_member" "build_source" {
  project = var.project_id
  role    = "roles/storage.objectViewer"
  member  = google_service_account.account["build"].member

  condition {
    title      = "function-sources"
    expression = "resource.name.startsWith(\"projects/_/buckets/gcf-v2-sources-${data.google_project.project.number}-\")"
  }
}
