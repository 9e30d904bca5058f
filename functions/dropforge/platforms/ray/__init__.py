"""Platform `ray`: Ray on GKE (KubeRay) trains on a slice of TPU hosts. It builds on platform `gke`."""

from __future__ import annotations

from dropforge.platforms.platform import Permission, Platform, Training

from .spec import RayTarget

PLATFORM = Platform(
    name="ray",
    training=Training(
        spec=RayTarget,
        adapter="dropforge.platforms.ray.train:RayJobs",
        kinds=("ray.io/RayJob", "ray.io/RayCluster"),
        needs=("gke_cluster", "train_ray_image"),
        permissions=(Permission("provision", "clusters", "container.clusters.connect"),),
    ),
    services=("container",),
)
