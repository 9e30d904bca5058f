"""KubeRay and GKE's TPU webhook: RayJobs and RayClusters whose nodes are pods that run real Ray.

After KubeRay's operator (https://github.com/ray-project/kuberay, ray-operator/controllers/ray, August 2026). Not there,
and refused with 501: submission modes other than HTTPMode, the autoscaler, GCS fault tolerance, deletion strategies,
mutual TLS, the history server. Differences: a node's liveness is asked over HTTP, as of Ray 2.53, whatever rayVersion
says; what a worker waits for (wait-gcs-ready) is the port of the head's agent, not `ray health-check`, which costs a
CPU seconds.
"""
