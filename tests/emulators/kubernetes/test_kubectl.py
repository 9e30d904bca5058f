"""kubectl, which tests more than the client: discovery, validation, the three-way merge of apply, waiting, tables."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import TOKEN, Kube, make_deployment, make_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]


class Kubectl:
    """Runs kubectl against the cluster, in the test's namespace."""

    def __init__(self, kube: Kube, home: Path) -> None:
        self._home = home
        (home / "ca.pem").write_text(kube.authority)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": kube.url, "certificate-authority": str(home / "ca.pem")}}],
            "users": [{"name": "u", "user": {"token": TOKEN.partition(" ")[2]}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": kube.namespace}}],
        }
        (home / "config").write_text(yaml.safe_dump(config))
        self.environment = {**os.environ, "KUBECONFIG": str(home / "config"), "HOME": str(home)}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            ["kubectl", *arguments], env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def file(self, *items: Any) -> str:
        path = self._home / "manifest.yaml"
        path.write_text(yaml.safe_dump_all(items))
        return str(path)


@pytest.fixture
def kubectl(kube: Kube, tmp_path: Path) -> Kubectl:
    return Kubectl(kube, tmp_path)


def test_a_job_from_apply_to_delete(kubectl: Kubectl, tmp_path: Path) -> None:
    manifest = kubectl.file(make_job("count", "count", "5", "0.1", str(tmp_path / "seen")))
    assert "job.batch/count created" in kubectl("apply", "-f", manifest)
    assert "job.batch/count unchanged" in kubectl("apply", "-f", manifest)
    assert "condition met" in kubectl("wait", "--for=condition=Ready", "pod", "-l", "job-name=count", "--timeout=150s")
    (tmp_path / "seen").touch()  # a pod that has ended is not Ready, so it must not end before kubectl has started
    assert kubectl("logs", "-f", "job/count").splitlines()[-1] == "line 4"
    assert "condition met" in kubectl("wait", "--for=condition=complete", "job/count", "--timeout=150s")
    described = kubectl("describe", "job", "count")
    assert "0 Active (0 Ready) / 1 Succeeded / 0 Failed" in described
    assert "SuccessfulCreate" in described
    assert kubectl("get", "jobs").split()[:5] == ["NAME", "STATUS", "COMPLETIONS", "DURATION", "AGE"]
    assert "Completed" in kubectl("get", "pods", "-o", "wide")
    kubectl("delete", "job", "count", "--wait")
    assert "No resources found" in kubectl("get", "jobs,pods")


def test_apply_merges_three_ways(kubectl: Kubectl, kube: Kube) -> None:
    first = make_deployment("d", 0, env={"A": "1", "B": "2"})
    kubectl("apply", "-f", kubectl.file(first))
    kube.apps.patch_namespaced_deployment("d", kube.namespace, {"metadata": {"labels": {"by": "hand"}}})
    second = make_deployment("d", 0, env={"A": "1", "C": "3"})
    assert "configured" in kubectl("apply", "-f", kubectl.file(second))
    item = kube.apps.read_namespaced_deployment("d", kube.namespace)
    assert [variable.name for variable in item.spec.template.spec.containers[0].env] == ["A", "C"]
    assert item.metadata.labels == {"by": "hand"}


def test_server_side_apply_creates_an_object_and_removes_what_its_manager_no_longer_applies(
    kubectl: Kubectl, kube: Kube
) -> None:
    def apply(manifest: Any, *options: str, code: int = 0) -> str:
        return kubectl("apply", "--server-side", *options, "-f", kubectl.file(manifest), code=code)

    assert "serverside-applied" in apply(make_deployment("d", 0, env={"A": "1", "B": "2"}))
    version = kube.apps.read_namespaced_deployment("d", kube.namespace).metadata.resource_version
    apply(make_deployment("d", 0, env={"A": "1", "B": "2"}))
    kube.apps.patch_namespaced_deployment("d", kube.namespace, {"metadata": {"labels": {"by": "hand"}}})
    apply(make_deployment("d", 0, env={"A": "1", "C": "3"}))
    item = kube.apps.read_namespaced_deployment("d", kube.namespace)
    assert [variable.name for variable in item.spec.template.spec.containers[0].env] == ["A", "C"]
    assert item.metadata.labels == {"by": "hand"}
    managers = {(entry.manager, entry.operation) for entry in item.metadata.managed_fields}
    assert managers == {("kubectl", "Apply"), ("OpenAPI-Generator", "Update")}
    assert int(item.metadata.resource_version) > int(version)


def test_an_apply_of_what_another_manager_owns_conflicts_unless_it_is_forced(kubectl: Kubectl, kube: Kube) -> None:
    def apply(replicas: int, *options: str, code: int = 0) -> str:
        path = kubectl.file(make_deployment("d", replicas))
        return kubectl("apply", "--server-side", *options, "-f", path, code=code)

    apply(0)
    kubectl("scale", "deployment", "d", "--replicas=1")
    refused = apply(0, code=1)
    assert "conflict with" in refused
    assert ".spec.replicas" in refused
    assert kube.apps.read_namespaced_deployment("d", kube.namespace).spec.replicas == 1
    apply(0, "--force-conflicts")
    assert kube.apps.read_namespaced_deployment("d", kube.namespace).spec.replicas == 0
    assert 'conflict with "kubectl"' in apply(1, "--field-manager=other", code=1)


def test_an_object_from_before_its_first_apply_belongs_to_its_writer(kubectl: Kubectl, kube: Kube) -> None:
    kube.apps.create_namespaced_deployment(kube.namespace, make_deployment("d", 0))
    path = kubectl.file(make_deployment("d", 0, env={"A": "changed"}))
    kubectl("apply", "--server-side", "-f", path)
    path = kubectl.file(make_deployment("d", 1))
    assert 'conflict with "before-first-apply"' in kubectl("apply", "--server-side", "-f", path, code=1)
    unnamed = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}
    assert "created" in kubectl("apply", "--server-side", "--dry-run=server", "-f", kubectl.file(unnamed)).replace(
        "serverside-applied", "created"
    )
    assert "not found" in kubectl("get", "configmap", "c", code=1)


def test_mistakes_are_refused_with_default_validation(kubectl: Kubectl) -> None:
    job = make_job("a")
    job["spec"]["parallelizm"] = 2
    assert 'unknown field "spec.parallelizm"' in kubectl("apply", "-f", kubectl.file(job), code=1)
    job = make_job("a", pod={"restartPolicy": "Always"})
    assert "spec.template.spec.restartPolicy: Required value" in kubectl("create", "-f", kubectl.file(job), code=1)
    assert "(server dry run)" in kubectl("apply", "--dry-run=server", "-f", kubectl.file(make_job("a")))
    assert "not found" in kubectl("get", "job", "a", code=1)


def test_a_rollout_is_followed_and_undone(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", kubectl.file(make_deployment("d", 2)))
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/d", "--timeout=150s")
    assert "condition met" in kubectl("wait", "--for=condition=Available", "deployment/d", "--timeout=150s")
    kubectl("set", "env", "deployment/d", "VERSION=two")
    kubectl("rollout", "status", "deployment/d", "--timeout=150s")
    assert "rolled back" in kubectl("rollout", "undo", "deployment/d")
    kubectl("rollout", "status", "deployment/d", "--timeout=150s")
    kubectl("scale", "deployment/d", "--replicas=1")
    kubectl("wait", "--for=jsonpath={.status.replicas}=1", "deployment/d", "--timeout=150s")
    described = kubectl("describe", "deployment", "d")
    assert "ScalingReplicaSet" in described
    assert "MinimumReplicasAvailable" in described


def test_discovery_lists_the_kinds(kubectl: Kubectl) -> None:
    assert "Server Version: v1.33" in kubectl("version")
    resources = kubectl("api-resources")
    assert all(name in resources for name in ("jobs", "deployments", "rayjobs", "horizontalpodautoscalers"))
    assert "ENUM:" in kubectl("explain", "job.spec.template.spec.restartPolicy")


def test_secrets_services_and_everything_else(kubectl: Kubectl) -> None:
    kubectl("create", "secret", "generic", "hf-secret", "--from-literal=hf_api_token=x")
    kubectl("create", "configmap", "conf", "--from-literal=a=b")
    kubectl("create", "sa", "trainer")
    assert kubectl("get", "configmap", "conf", "-o", "jsonpath={.data.a}") == "b"
    assert kubectl("get", "secret", "hf-secret", "-o", "jsonpath={.data.hf_api_token}") == "eA=="
    job = ("create", "job", "j", "--image=i")
    assert "--dry-run=client -o yaml | kubectl apply" in kubectl(*job, code=1)
    kubectl("apply", "-f", kubectl.file(make_deployment("d")))
    kubectl("expose", "deployment", "d", "--port=80", "--target-port=8000")
    assert "local.dropforge/urls" in kubectl("describe", "service", "d")
    assert "hf_api_token" in kubectl("describe", "secret", "hf-secret")
    assert "service/d" in kubectl("get", "all")
    assert kubectl("get", "events", "-o", "name")
    kubectl("label", "configmap", "conf", "x=y")
    kubectl("annotate", "configmap", "conf", "x=y")
    assert "conf" in kubectl("get", "cm", "-l", "x=y")
    assert "RayJob" in kubectl("create", "-o", "yaml", "-f", kubectl.file(
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "r"}, "spec": {"submissionMode": "HTTPMode"}}
    ))  # fmt: skip
    kubectl("delete", "deployment,service,secret,cm,rayjob", "--all", "--wait")


def test_hanging_pod_is_deleted_after_its_grace_time(kubectl: Kubectl) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **{"metadata": {"name": "p"}}}
    pod["spec"] = make_job("x", "stubborn", pod={"terminationGracePeriodSeconds": 1})["spec"]["template"]["spec"]
    kubectl("create", "-f", kubectl.file(pod))
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/p", "--timeout=150s")
    kubectl("delete", "pod", "p", "--wait", "--timeout=150s")
    assert "not found" in kubectl("get", "pod", "p", code=1)


def test_auth_can_i(kubectl: Kubectl) -> None:
    assert kubectl("auth", "can-i", "create", "pods").strip() == "yes"
    assert "*.*" in kubectl("auth", "can-i", "--list")
