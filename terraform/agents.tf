# The agents of services: the accounts by which Google's services act in the project. Google makes an agent when the
# project first uses its service, and the agent gets its role minutes later: until then, the first workflow and the first
# trigger are refused (https://cloud.google.com/iam/docs/create-service-agents). So each agent is made, gets the role that
# Google gives it, and whatever needs it waits. The provider's own resource for agents, google_project_service_identity,
# is in google-beta only. An agent and its role belong to the project: `destroy` leaves them.

locals {
  agent_roles = {
    eventarc  = "roles/eventarc.serviceAgent"
    pubsub    = "roles/pubsub.serviceAgent" # to sign the identity tokens of what it pushes to the functions
    workflows = "roles/workflows.serviceAgent"
  }
}

resource "terraform_data" "agent" {
  for_each = local.agent_roles

  triggers_replace = {
    agent   = "service-${data.google_project.project.number}@gcp-sa-${each.key}.iam.gserviceaccount.com"
    project = var.project_id
  }

  # A role takes about 2 minutes to hold everywhere (https://cloud.google.com/iam/docs/access-change-propagation).
  # Meanwhile the functions are built.
  provisioner "local-exec" {
    command = join(" && ", [
      "gcloud beta services identity create --service=${each.key}.googleapis.com --project=${self.triggers_replace.project} --quiet",
      join(" ", [
        "gcloud projects add-iam-policy-binding ${self.triggers_replace.project} --condition=None --format=none --quiet",
        "--member=serviceAccount:${self.triggers_replace.agent} --role=${each.value}",
      ]),
      "sleep 120",
    ])
  }

  depends_on = [google_project_service.api]
}

moved {
  from = terraform_data.workflows_agent
  to   = terraform_data.agent["workflows"]
}
