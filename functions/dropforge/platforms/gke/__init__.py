"""Platform `gke`: Kubernetes Jobs on GKE Autopilot train, Deployments serve."""

from __future__ import annotations

from dropforge.platforms.platform import Permission, Platform, Serving, Training, Usual

from .spec import GkeServe, GkeTarget

PLATFORM = Platform(
    name="gke",
    training=Training(
        spec=GkeTarget,
        adapter="dropforge.platforms.gke.train:GkeJobs",
        kinds=(
            "container.googleapis.com/Cluster",
            "batch.k8s.io/Job",
            "k8s.io/Service",
            "k8s.io/Pod",
            "networking.k8s.io/NetworkPolicy",
        ),
        needs=("gke_cluster",),
        permissions=(Permission("provision", "clusters", "container.clusters.connect"),),
        smoke_shows=(("gke-driver", "accelerator-seen"),),
        usual={"container.googleapis.com/Cluster": Usual(creation=480, deletion=240)},
    ),
    serving=(
        Serving(
            spec=GkeServe,
            adapter="dropforge.platforms.gke.serve:GkeDeployment",
            named="dropforge.platforms.gke.named:NamedDeployments",
            kinds=(
                "apps.k8s.io/Deployment",
                "autoscaling.k8s.io/HorizontalPodAutoscaler",
                "gateway.networking.k8s.io/HTTPRoute",
                "monitoring.googleapis.com/PodMonitoring",
                "networking.gke.io/GCPBackendPolicy",
                "networking.gke.io/HealthCheckPolicy",
            ),
            permissions=(Permission("deploy", "clusters", "container.clusters.connect"),),
            start_seconds=300,  # for a machine, the image and the weights
        ),
    ),
    services=("compute", "container"),
)
