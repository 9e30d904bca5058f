# What a cluster needs before runs can use it: the namespace, the accounts of pods, and the permissions of each function.
# It is an output and not a resource, so Terraform need not reach clusters that it has not created yet.

locals {
  _namespace  = local.settings.kubernetes_namespace
  _pods       = { trainer = local.settings.kubernetes_trainer_account, server = local.settings.kubernetes_server_account }
  _in_cluster = { for name, account in local.accounts : name => account.kubernetes if can(account.kubernetes) }

  # The Gateway of named endpoints (functions/dropforge/platforms/gke/gateway.py). Its proxies reach pods from their
  # subnetwork, and Google's health checks from two ranges.
  _gateway         = "endpoints"
  _gateway_proxies = concat([for range in var.endpoint_gateway : range], ["35.191.0.0/16", "130.211.0.0/22"])
  _gateway_objects = [
    {
      apiVersion = "gateway.networking.k8s.io/v1"
      kind       = "Gateway"
      metadata   = { name = local._gateway, namespace = local._namespace }
      spec       = { gatewayClassName = "gke-l7-rilb", listeners = [{ name = "http", protocol = "HTTP", port = 80 }] }
    },
    {
      apiVersion = "networking.gke.io/v1"
      kind       = "GCPGatewayPolicy"
      metadata   = { name = local._gateway, namespace = local._namespace }
      spec = {
        default   = { allowGlobalAccess = true }
        targetRef = { group = "gateway.networking.k8s.io", kind = "Gateway", name = local._gateway }
      }
    },
    {
      apiVersion = "networking.k8s.io/v1"
      kind       = "NetworkPolicy"
      metadata   = { name = "gateway", namespace = local._namespace }
      spec = {
        podSelector = { matchExpressions = [{ key = "dropforge-endpoint", operator = "Exists" }] }
        policyTypes = ["Ingress"]
        ingress = [{
          from  = [for range in local._gateway_proxies : { ipBlock = { cidr = range } }]
          ports = [{ protocol = "TCP", port = 8000 }]
        }]
      }
    },
  ]

  kubernetes_objects = concat(
    [{
      apiVersion = "v1"
      kind       = "Namespace"
      metadata   = { name = local._namespace }
    }],
    # Nothing reaches a pod that no other policy lets it reach. Attempts of several pods add a policy of their own.
    # Autopilot enforces policies. https://cloud.google.com/kubernetes-engine/docs/concepts/dataplane-v2
    [{
      apiVersion = "networking.k8s.io/v1"
      kind       = "NetworkPolicy"
      metadata   = { name = "default-deny", namespace = local._namespace }
      spec       = { podSelector = {}, policyTypes = ["Ingress"] }
    }],
    # Clients in the network and in other namespaces reach endpoints, at the port of vLLM. Training pods do not. A pod of
    # a run's own endpoint has the first label, a pod of a named endpoint the second one.
    [for name, label in { endpoints = "dropforge-expires", named-endpoints = "dropforge-endpoint" } : {
      apiVersion                    = "networking.k8s.io/v1"
      kind                          = "NetworkPolicy"
      metadata                      = { name = name, namespace = local._namespace }
      spec = {
        podSelector = { matchExpressions = [{ key = label, operator = "Exists" }] }
        policyTypes = ["Ingress"]
        ingress = [{
          from = concat(
            [for range in var.client_ranges : { ipBlock = { cidr = range } }],
            [{ namespaceSelector = { matchExpressions = [{ key = "kubernetes.io/metadata.name", operator = "NotIn", values = [local._namespace] }] } }],
          )
          ports = [{ protocol = "TCP", port = 8000 }]
        }]
      }
    }],
    # One load balancer for the named endpoints of a cluster; each endpoint is a route. With global access, clients of
    # every region reach it. https://cloud.google.com/kubernetes-engine/docs/how-to/configure-gateway-resources
    [for object in local._gateway_objects : object if length(var.endpoint_gateway) > 0],
    # A pod with one of these accounts acts as the service account in the annotation.
    [for role, name in local._pods : {
      apiVersion = "v1"
      kind       = "ServiceAccount"
      metadata = {
        name        = name
        namespace   = local._namespace
        annotations = { "iam.gke.io/gcp-service-account" = google_service_account.account[role].email }
      }
    }],
    [for name, resources in local._in_cluster : {
      apiVersion = "rbac.authorization.k8s.io/v1"
      kind       = "Role"
      metadata   = { name = google_service_account.account[name].account_id, namespace = local._namespace }
      rules = [for resource, verbs in resources : {
        apiGroups = [join("/", slice(split("/", resource), 0, length(split("/", resource)) - 1))]
        resources = [reverse(split("/", resource))[0]]
        verbs     = verbs
      }]
    }],
    # A token with scope cloud-platform names its account by e-mail or by number.
    [for name in keys(local._in_cluster) : {
      apiVersion = "rbac.authorization.k8s.io/v1"
      kind       = "RoleBinding"
      metadata   = { name = google_service_account.account[name].account_id, namespace = local._namespace }
      roleRef = {
        apiGroup = "rbac.authorization.k8s.io"
        kind     = "Role"
        name     = google_service_account.account[name].account_id
      }
      subjects = [for user in [google_service_account.account[name].email, google_service_account.account[name].unique_id] : {
        apiGroup = "rbac.authorization.k8s.io"
        kind     = "User"
        name     = user
      }]
    }],
  )
}

# Google creates the project's workload identity pool with its first cluster. Without cluster_regions, a user must have
# created a cluster before.
resource "google_service_account_iam_member" "pods" {
  for_each = contains(local._switched_off, "clusters") ? {} : local._pods

  service_account_id = google_service_account.account[each.key].name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project_id}.svc.id.goog[${local._namespace}/${each.value}]"

  depends_on = [google_container_cluster.region]
}
