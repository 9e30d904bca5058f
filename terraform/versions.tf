terraform {
  required_version = ">= 1.9, < 2.0"

  # Their hashes are in .terraform.lock.hcl. Terraform's registry was not reached: the hashes are those of public lock files,
  # read on 2026-11-23, which agree (archive in three repositories, google for Linux in two).
  required_providers {
    archive = {
      source  = "hashicorp/archive"
      version = "2.7.1"
    }
    google = {
      source  = "hashicorp/google"
      version = "7.46.0"
    }
  }

  # tools/deploy.sh creates the bucket and passes it: -backend-config=bucket=...
  backend "gcs" {
    prefix = "terraform"
  }
}

provider "google" {
  project = var.project_id
  region  = var.region

  # Not the labels of functions/dropforge/base/names.py: a resource with those belongs to a run, and the sweep deletes it.
  default_labels = { deployment = var.prefix }
}

# The API for budgets requires that a user's credentials name the project whose quota is charged.
provider "google" {
  alias                 = "billing"
  project               = var.project_id
  billing_project       = var.project_id
  user_project_override = true
}
