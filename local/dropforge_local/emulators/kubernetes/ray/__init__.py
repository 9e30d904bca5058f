"""KubeRay and GKE's TPU webhook: RayJobs and RayClusters whose nodes are pods that run real Ray.

After KubeRay's operator (https://github.com/ray-project/kuberay, ray-operator/controllers/ray, August 2026). Refused
with 501: submission modes other than HTTPMode, the autoscaler, GCS fault tolerance, deletion strategies, mutual TLS,
the history server. Differences: liveness probes use HTTP, as since Ray 2.53, whatever rayVersion is; a worker
(wait-gcs-ready) waits for the port of the head's agent instead of `ray health-check`, which takes seconds of CPU.
"""
