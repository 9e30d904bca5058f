"""KubeRay and GKE's TPU webhook: RayJobs and RayClusters whose nodes are pods that run real Ray.

After KubeRay's operator (https://github.com/ray-project/kuberay, ray-operator/controllers/ray, August 2026). Refused
with 501: submission modes other than HTTPMode, the autoscaler, GCS fault tolerance, deletion strategies, mutual TLS,
the history server. KubernetesConfig.kuberay chooses the operator's version (kuberay.py): its fields, its probes and
how it replaces hosts. RayServices do not exist here (404), and no submitter pod: with HTTPMode the operator submits.
Differences: a worker (wait-gcs-ready) waits for the port of the head's agent instead of `ray health-check`, which takes
seconds of CPU; every version labels pods with their replica and host, as the operator does by default since 1.6.
"""
