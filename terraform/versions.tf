terraform {
  required_version = ">= 1.9, < 2.0"

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

  # The bucket is given by tools/deploy.sh, which creates it: -backend-config=bucket=...
  backend "gcs" {
    prefix = "terraform"
  }
}

provider "google" {
  project = var.project_id
  region  = var.region

  # Not the labels of names.py: what carries those belongs to a run, and the sweep deletes it.
  default_labels = { deployment = var.prefix }
}

# The budgets' API asks a person's credentials which project its quota is charged to.
provider "google" {
  alias                 = "billing"
  project               = var.project_id
  billing_project       = var.project_id
  user_project_override = true
}
