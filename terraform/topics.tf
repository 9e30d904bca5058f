resource "google_pubsub_topic" "requests" {
  name = "${var.prefix}-requests"

  depends_on = [google_project_service.api]
}

# Each topic is a source of its own: a request reaches only the runs of its topic.
resource "google_pubsub_topic" "more_requests" {
  for_each = var.request_topics

  name = "${var.prefix}-requests-${each.key}"

  depends_on = [google_project_service.api]
}

resource "google_pubsub_topic_iam_member" "requester" {
  for_each = merge([
    for name, members in var.request_topics : { for member in members : "${name} ${member}" => [name, member] }
  ]...)

  topic  = google_pubsub_topic.more_requests[each.value[0]].name
  role   = "roles/pubsub.publisher"
  member = each.value[1]
}

# Operators cancel any run here.
resource "google_pubsub_topic" "operations" {
  name = "${var.prefix}-operations"

  depends_on = [google_project_service.api]
}

resource "google_pubsub_topic_iam_member" "operator" {
  for_each = var.operators

  topic  = google_pubsub_topic.operations.name
  role   = "roles/pubsub.publisher"
  member = each.key
}

resource "google_pubsub_topic" "job_events" {
  name = "${var.prefix}-job-events"

  depends_on = [google_project_service.api]
}

# Messages are kept for a week, so a system that subscribes late, or was down, can seek back.
resource "google_pubsub_topic" "run_events" {
  name                       = "${var.prefix}-run-events"
  message_retention_duration = "604800s"

  depends_on = [google_project_service.api]
}

# One dead-letter topic for each trigger. Without a subscription, the topic would drop its messages.
resource "google_pubsub_topic" "dead_letter" {
  for_each = local.triggers

  name = "${var.prefix}-${replace(each.key, "_", "-")}-dead-letter"

  depends_on = [google_project_service.api]
}

resource "google_pubsub_subscription" "dead_letter" {
  for_each = local.triggers

  name                       = google_pubsub_topic.dead_letter[each.key].name
  topic                      = google_pubsub_topic.dead_letter[each.key].id
  message_retention_duration = "1209600s" # 14 days
  ack_deadline_seconds       = 60

  expiration_policy {
    ttl = "" # never: by default an unread subscription is deleted after 31 days
  }
}
