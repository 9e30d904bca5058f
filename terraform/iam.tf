# Makes custom roles from permissions.yaml. Each role is bound only where its account needs it. The exceptions are
# data_buckets and model_buckets: a custom role of a project cannot be bound on a bucket of another project
# (https://cloud.google.com/iam/docs/roles-overview#custom), so the smallest predefined roles are bound there.

locals {
  _switched_off = concat(
    length(setunion(var.cluster_regions, var.ephemeral_cluster_regions)) == 0 ? ["clusters"] : [],
    length(var.ephemeral_cluster_regions) == 0 ? ["nodes_account", "own_clusters"] : [],
    length(var.tpu_regions) == 0 ? ["tpus"] : [],
    var.otlp_endpoint == "https://telemetry.googleapis.com" ? [] : ["traces"],
    var.endpoint_domain == "" ? ["dns_zone"] : [],
  )

  _accounts = yamldecode(file("${path.module}/permissions.yaml")).accounts
  accounts  = { for name, account in local._accounts : name => account if local.has_console || !contains(["ask", "console", "preflight"], name) }

  grants = merge([
    for account, found in local.accounts : {
      for scope, permissions in found.grants : "${account}.${scope}" => {
        account     = account
        scope       = scope
        permissions = keys(permissions)
      } if !contains(local._switched_off, scope)
    }
  ]...)

  _runs_objects = "projects/_/buckets/${google_storage_bucket.runs.name}/objects"
  _below = {
    runs   = "resource.name.startsWith(\"${local._runs_objects}/runs/\")"
    events = "resource.name.extract(\"/objects/runs/{run}/events/\") != \"\""
    device = "resource.name.startsWith(\"${local._runs_objects}/machines/\")"
    checks = "resource.name.startsWith(\"${local._runs_objects}/checkpoints/\")"
    models = "resource.name.startsWith(\"${local._runs_objects}/models/\")"
    names  = "resource.name.startsWith(\"${local._runs_objects}/endpoints/\")"
    copies = "resource.name.startsWith(\"${local._runs_objects}/models/copy--\")"
    caches = "resource.name.startsWith(\"${local._runs_objects}/caches/\")"
    keys   = "resource.name.startsWith(\"${local._runs_objects}/keys/\")"
  }

  # The specs that the console drops. The functions believe what such an object says of its submitter, so nobody else
  # may create one.
  _console_specs = "resource.name.startsWith(\"projects/_/buckets/${google_storage_bucket.specs.name}/objects/specs/console/\")"

  # The models and records of another deployment, in its runs bucket: not the keys of its runs, which are in there, too.
  _others_objects = "projects/_/buckets/{bucket}/objects"
  _others_models  = "resource.name.startsWith(\"${local._others_objects}/models/\") || resource.name.startsWith(\"${local._others_objects}/runs/\")"

  # Scopes that are buckets or parts of a bucket: the bucket, and the condition, in which {bucket} stands for its name.
  bucket_scopes = {
    specs_bucket     = { buckets = [google_storage_bucket.specs.name], condition = "" }
    console_specs    = { buckets = [google_storage_bucket.specs.name], condition = local._console_specs }
    data_buckets     = { buckets = var.data_buckets, condition = "" }
    data_locations   = { buckets = var.data_buckets, condition = "" } # no predefined role of Cloud Storage reads both
    model_buckets    = { buckets = var.model_buckets, condition = local._others_models }
    runs_bucket      = { buckets = [google_storage_bucket.runs.name], condition = "" }
    readable_objects = { buckets = [google_storage_bucket.runs.name], condition = "!${local._below.keys}" }
    key_objects      = { buckets = [google_storage_bucket.runs.name], condition = local._below.keys }
    run_objects      = { buckets = [google_storage_bucket.runs.name], condition = local._below.runs }
    endpoint_objects = { buckets = [google_storage_bucket.runs.name], condition = local._below.names }
    event_objects    = { buckets = [google_storage_bucket.runs.name], condition = "${local._below.runs} && ${local._below.events}" }
    copied_objects   = { buckets = [google_storage_bucket.runs.name], condition = local._below.copies }
    cache_objects    = { buckets = [google_storage_bucket.runs.name], condition = local._below.caches }
    lent_objects     = { buckets = [google_storage_bucket.runs.name], condition = "${local._below.checks} || ${local._below.models} || ${local._below.device}" }
  }

  # Buckets that may be in other projects, and the smallest predefined role that holds the permissions of a grant there;
  # false: of the bucket, and the list of its objects.
  foreign_scopes       = ["data_buckets", "data_locations", "model_buckets"]
  foreign_bucket_roles = { true = "roles/storage.objectViewer", false = "roles/storage.legacyBucketReader" }
  bucket_roles = {
    for key, grant in local.grants : key => contains(local.foreign_scopes, grant.scope) ? (
      local.foreign_bucket_roles[contains(grant.permissions, "storage.objects.get")]
    ) : google_project_iam_custom_role.grant[key].id if contains(keys(local.bucket_scopes), grant.scope)
  }

  project_scopes = ["project", "clusters", "own_clusters", "tpus", "traces"]

  secret_scopes = {
    training_secrets = var.training_secrets
    webhook_secrets  = local.webhook_secrets
    endpoint_keys    = local.endpoint_keys
  }

  topic_scopes = {
    run_events_topic = google_pubsub_topic.run_events.name
    job_events_topic = google_pubsub_topic.job_events.name
    console_topic    = local.settings.console_topic
  }

  account_scopes = {
    trainer_account = google_service_account.account["trainer"].name
    server_account  = google_service_account.account["server"].name
    nodes_account   = google_service_account.account["nodes"].name
  }
}

resource "google_project_iam_custom_role" "grant" {
  for_each = { for key, grant in local.grants : key => grant if !contains(local.foreign_scopes, grant.scope) }

  role_id     = replace("${var.prefix}_${each.value.account}_${each.value.scope}", "-", "_")
  title       = "${var.prefix} ${each.value.account} on ${each.value.scope}"
  description = "See terraform/permissions.yaml."
  permissions = each.value.permissions

  depends_on = [google_project_service.api]
}

resource "google_project_iam_member" "grant" {
  for_each = { for key, grant in local.grants : key => grant if contains(local.project_scopes, grant.scope) }

  project = var.project_id
  role    = google_project_iam_custom_role.grant[each.key].id
  member  = google_service_account.account[each.value.account].member
}

resource "google_storage_bucket_iam_member" "grant" {
  for_each = merge([
    for key, grant in local.grants : {
      for bucket in local.bucket_scopes[grant.scope].buckets : "${key}.${bucket}" => {
        grant   = grant
        role    = key
        bucket  = bucket
        allowed = replace(local.bucket_scopes[grant.scope].condition, "{bucket}", bucket)
      }
    } if contains(keys(local.bucket_scopes), grant.scope)
  ]...)

  bucket = each.value.bucket
  role   = local.bucket_roles[each.value.role]
  member = google_service_account.account[each.value.grant.account].member

  dynamic "condition" {
    for_each = each.value.allowed == "" ? [] : [each.value.allowed]
    content {
      title      = each.value.grant.scope
      expression = condition.value
    }
  }
}

resource "google_secret_manager_secret_iam_member" "grant" {
  for_each = merge([
    for key, grant in local.grants : {
      for secret in local.secret_scopes[grant.scope] : "${key}.${secret}" => {
        grant  = grant
        role   = key
        secret = secret
      }
    } if contains(keys(local.secret_scopes), grant.scope)
  ]...)

  secret_id = google_secret_manager_secret.secret[each.value.secret].id
  role      = google_project_iam_custom_role.grant[each.value.role].id
  member    = google_service_account.account[each.value.grant.account].member
}

resource "google_pubsub_topic_iam_member" "grant" {
  for_each = { for key, grant in local.grants : key => grant if contains(keys(local.topic_scopes), grant.scope) }

  topic  = local.topic_scopes[each.value.scope]
  role   = google_project_iam_custom_role.grant[each.key].id
  member = google_service_account.account[each.value.account].member
}

resource "google_service_account_iam_member" "grant" {
  for_each = { for key, grant in local.grants : key => grant if contains(keys(local.account_scopes), grant.scope) }

  service_account_id = local.account_scopes[each.value.scope]
  role               = google_project_iam_custom_role.grant[each.key].id
  member             = google_service_account.account[each.value.account].member
}

resource "google_artifact_registry_repository_iam_member" "grant" {
  for_each = { for key, grant in local.grants : key => grant if grant.scope == "registry" }

  repository = google_artifact_registry_repository.images.name
  location   = google_artifact_registry_repository.images.location
  role       = google_project_iam_custom_role.grant[each.key].id
  member     = google_service_account.account[each.value.account].member
}

resource "google_dns_managed_zone_iam_member" "grant" {
  for_each = { for key, grant in local.grants : key => grant if grant.scope == "dns_zone" }

  managed_zone = google_dns_managed_zone.endpoints[0].name
  role         = google_project_iam_custom_role.grant[each.key].id
  member       = google_service_account.account[each.value.account].member
}

# People and CI that may drop specs and follow their runs.
resource "google_storage_bucket_iam_member" "submitter" {
  for_each = var.submitters

  bucket = google_storage_bucket.specs.name
  role   = "roles/storage.objectUser"
  member = each.key

  dynamic "condition" {
    for_each = local.console
    content {
      title      = "not_the_consoles_specs"
      expression = "!${local._console_specs}"
    }
  }
}

resource "google_storage_bucket_iam_member" "reader" {
  for_each = var.submitters

  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectViewer"
  member = each.key

  condition {
    title      = "readable_objects"
    expression = local.bucket_scopes.readable_objects.condition
  }
}
