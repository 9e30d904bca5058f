# Eventarc delivers at least once, retries for 24 hours with growing pauses, and then drops an event. Before that, the
# event moves to the dead-letter topic.

locals {
  _published = "google.cloud.pubsub.topic.v1.messagePublished"

  # One trigger for each source of events. The topics of `request_topics` and of the console come in addition.
  triggers = merge(local._triggers, {
    for name in local.console : "on_${name}" => {
      function = "on_spec_message"
      filters  = { type = local._published }
      topics   = [google_pubsub_topic.console[name].id]
    }
    }, {
    for name in keys(var.request_topics) : "on_request_${name}" => {
      function = "on_spec_message"
      filters  = { type = local._published }
      topics   = [google_pubsub_topic.more_requests[name].id]
    }
  })
  dead_letters = [for name in keys(local.triggers) : "${var.prefix}-${replace(name, "_", "-")}-dead-letter"]

  _triggers = {
    on_spec_uploaded = {
      function = "on_spec_uploaded"
      filters = {
        type   = "google.cloud.storage.object.v1.finalized"
        bucket = google_storage_bucket.specs.name
      }
      topics = []
    }
    on_spec_deleted = {
      function = "on_spec_deleted"
      filters = {
        type   = "google.cloud.storage.object.v1.deleted"
        bucket = google_storage_bucket.specs.name
      }
      topics = []
    }
    on_spec_message = {
      function = "on_spec_message"
      filters  = { type = local._published }
      topics   = [google_pubsub_topic.requests.id]
    }
    on_operation = {
      function = "on_spec_message"
      filters  = { type = local._published }
      topics   = [google_pubsub_topic.operations.id]
    }
    on_job_event = {
      function = "on_job_event"
      filters  = { type = local._published }
      topics   = [google_pubsub_topic.job_events.id]
    }
  }
}

resource "google_eventarc_trigger" "trigger" {
  for_each = local.triggers

  name            = "${var.prefix}-${replace(each.key, "_", "-")}"
  location        = var.region # must be the region of the specs bucket, whose events exist only there
  service_account = google_service_account.account["events"].email

  dynamic "matching_criteria" {
    for_each = each.value.filters
    content {
      attribute = matching_criteria.key
      value     = matching_criteria.value
    }
  }

  dynamic "transport" {
    for_each = each.value.topics
    content {
      pubsub {
        topic = transport.value
      }
    }
  }

  destination {
    cloud_run_service {
      service = google_cloudfunctions2_function.function[each.value.function].name
      region  = var.region
    }
  }

  depends_on = [
    google_cloud_run_v2_service_iam_member.caller,
    google_project_iam_member.events,
    google_project_iam_member.storage_events,
    terraform_data.agent,
  ]
}

# Eventarc creates the subscription. Its API can set neither the dead-letter topic
# (https://github.com/hashicorp/terraform-provider-google/issues/17697) nor the time to acknowledge an event. The default
# is 10 seconds: after that the event is delivered again while the function still runs, and counts as failed.
resource "terraform_data" "dead_letter" {
  for_each = local.triggers

  triggers_replace = {
    subscription = google_eventarc_trigger.trigger[each.key].transport[0].pubsub[0].subscription
    topic        = google_pubsub_topic.dead_letter[each.key].id
    attempts     = var.max_delivery_attempts
    ack_deadline = 600 # seconds, the maximum: longer than a function may run
  }

  provisioner "local-exec" {
    command = join(" ", [
      "gcloud pubsub subscriptions update ${self.triggers_replace.subscription} --project=${var.project_id}",
      "--dead-letter-topic=${self.triggers_replace.topic}",
      "--max-delivery-attempts=${self.triggers_replace.attempts}",
      "--ack-deadline=${self.triggers_replace.ack_deadline}",
      "--min-retry-delay=10s --max-retry-delay=600s",
    ])
  }

  depends_on = [
    google_pubsub_subscription_iam_member.dead_letter,
    google_pubsub_topic_iam_member.dead_letter,
  ]
}

# Pub/Sub's agent moves a message: it publishes the message to the dead-letter topic and acknowledges it here.
resource "google_pubsub_topic_iam_member" "dead_letter" {
  for_each = local.triggers

  topic  = google_pubsub_topic.dead_letter[each.key].name
  role   = "roles/pubsub.publisher"
  member = local._pubsub_agent

  depends_on = [terraform_data.agent]
}

resource "google_pubsub_subscription_iam_member" "dead_letter" {
  for_each = local.triggers

  subscription = google_eventarc_trigger.trigger[each.key].transport[0].pubsub[0].subscription
  role         = "roles/pubsub.subscriber"
  member       = local._pubsub_agent
}

resource "google_project_iam_member" "events" {
  project = var.project_id
  role    = "roles/eventarc.eventReceiver"
  member  = google_service_account.account["events"].member
}

data "google_storage_project_service_account" "storage" {
  depends_on = [google_project_service.storage]
}

# The permission is on the project, because Eventarc creates the topic for the events of Cloud Storage.
resource "google_project_iam_member" "storage_events" {
  project = var.project_id
  role    = "roles/pubsub.publisher"
  member  = "serviceAccount:${data.google_storage_project_service_account.storage.email_address}"
}

locals {
  _pubsub_agent = "serviceAccount:service-${data.google_project.project.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}
