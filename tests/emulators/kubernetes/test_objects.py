"""The API with the official client and raw requests: objects, refusals, patches, deletion, ownership."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client
from kubernetes.client import exceptions

from dropforge_local.emulators.kubernetes.kinds import JOB
from dropforge_local.emulators.kubernetes.paths import Target
from dropforge_local.emulators.kubernetes.reviews import review

from .conftest import Kube, Running, make_client, make_deployment, make_job, make_pod

SUSPENDED = {"suspend": True}
MONITORING = {"selector": {}, "endpoints": [{"port": "http"}]}
CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
SERVICES = "/api/v1/namespaces/{}/services"


def config_map(name: str, data: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, **metadata}, **({"data": data} if data else {})}


def answer_of(error: exceptions.ApiException) -> Any:
    """The Status that the API sent with an error."""
    return json.loads(str(error.body))


def causes(body: Any) -> list[str]:
    return [cause["field"] for cause in body["details"]["causes"]]


def test_create_read_list_replace_delete(kube: Kube) -> None:
    made = kube.core.create_namespaced_config_map(kube.namespace, config_map("a", {"k": "1"}))
    assert (made.metadata.namespace, made.data) == (kube.namespace, {"k": "1"})
    assert made.metadata.uid
    made.data = {"k": "2"}
    replaced = kube.core.replace_namespaced_config_map("a", kube.namespace, made)
    assert int(replaced.metadata.resource_version) > int(made.metadata.resource_version)
    assert kube.core.read_namespaced_config_map("a", kube.namespace).data == {"k": "2"}
    assert [item.metadata.name for item in kube.core.list_namespaced_config_map(kube.namespace).items] == ["a"]
    kube.core.delete_namespaced_config_map("a", kube.namespace)
    with pytest.raises(exceptions.NotFoundException) as missing:
        kube.core.read_namespaced_config_map("a", kube.namespace)
    assert answer_of(missing.value)["message"] == 'configmaps "a" not found'


def test_names_can_be_generated(kube: Kube) -> None:
    made = kube.core.create_namespaced_config_map(kube.namespace, {"metadata": {"generateName": "run-"}})
    assert made.metadata.name.startswith("run-")
    assert len(made.metadata.name) == 9


def test_same_name_again_is_already_exists(kube: Kube) -> None:
    kube.create_job("a", **SUSPENDED)
    with pytest.raises(exceptions.ConflictException) as refused:
        kube.create_job("a", **SUSPENDED)
    body = answer_of(refused.value)
    assert (body["reason"], body["message"]) == ("AlreadyExists", 'jobs.batch "a" already exists')


def test_stale_writes_conflict(kube: Kube) -> None:
    first = kube.core.create_namespaced_config_map(kube.namespace, config_map("a"))
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"data": {"k": "1"}})
    with pytest.raises(exceptions.ConflictException) as refused:
        kube.core.replace_namespaced_config_map("a", kube.namespace, first)
    assert "the object has been modified" in answer_of(refused.value)["message"]
    stale = {"metadata": {"resourceVersion": first.metadata.resource_version}, "data": {"k": "2"}}
    with pytest.raises(exceptions.ConflictException):
        kube.core.patch_namespaced_config_map("a", kube.namespace, stale)


def test_unchanged_writes_make_no_new_version(kube: Kube) -> None:
    made = kube.core.create_namespaced_config_map(kube.namespace, config_map("a"))
    again = kube.core.patch_namespaced_config_map("a", kube.namespace, {"metadata": {"labels": {}}})
    assert again.metadata.resource_version == made.metadata.resource_version


def test_generation_counts_desired_states_only(kube: Kube) -> None:
    kube.create_job("a", **SUSPENDED)
    kube.batch.patch_namespaced_job("a", kube.namespace, {"metadata": {"labels": {"x": "y"}}})
    assert kube.job("a").metadata.generation == 1
    kube.batch.patch_namespaced_job("a", kube.namespace, {"spec": {"parallelism": 0}})
    assert kube.job("a").metadata.generation == 2


def test_status_is_written_through_its_own_path(kube: Kube) -> None:
    path = f"/apis/monitoring.googleapis.com/v1/namespaces/{kube.namespace}/podmonitorings"
    kube.call("POST", path, {"metadata": {"name": "r"}, "spec": MONITORING, "status": {"a": 0}})
    assert "status" not in kube.call("GET", f"{path}/r")[1]
    kube.call("PATCH", f"{path}/r/status", {"status": {"a": 1}, "spec": {"b": 2}}, "application/merge-patch+json")
    patched = kube.call("PATCH", f"{path}/r", {"status": {"a": 2}, "spec": {"c": 3}}, "application/merge-patch+json")[1]
    assert (patched["status"], patched["spec"]) == ({"a": 1}, {**MONITORING, "c": 3})


def test_custom_objects_are_stored(kube: Kube) -> None:
    where = ("monitoring.googleapis.com", "v1", kube.namespace, "podmonitorings")
    spec = {**MONITORING, "any": {"thing": 1}}
    kube.custom.create_namespaced_custom_object(*where, {"metadata": {"name": "c"}, "spec": spec})
    kube.custom.patch_namespaced_custom_object(*where, "c", {"spec": {"more": [1]}})
    listed = kube.custom.list_namespaced_custom_object(*where)["items"]
    assert listed[0]["spec"] == {**spec, "more": [1]}
    assert (listed[0]["kind"], listed[0]["apiVersion"]) == ("PodMonitoring", "monitoring.googleapis.com/v1")


def test_secrets_take_plain_text_and_give_base64(kube: Kube) -> None:
    kube.core.create_namespaced_secret(kube.namespace, {"metadata": {"name": "s"}, "stringData": {"k": "v"}})
    secret = kube.core.read_namespaced_secret("s", kube.namespace)
    assert (secret.data, secret.type, secret.string_data) == ({"k": "dg=="}, "Opaque", None)


def test_dry_runs_leave_nothing(kube: Kube) -> None:
    made = kube.batch.create_namespaced_job(kube.namespace, make_job("a"), dry_run="All")
    assert made.spec.completions == 1
    kube.core.create_namespaced_config_map(kube.namespace, config_map("x"))
    with pytest.raises(exceptions.ConflictException):
        kube.core.create_namespaced_config_map(kube.namespace, config_map("x"), dry_run="All")
    kube.core.delete_namespaced_config_map("x", kube.namespace, dry_run="All")
    kube.core.read_namespaced_config_map("x", kube.namespace)
    with pytest.raises(exceptions.NotFoundException):
        kube.job("a")


def test_selectors(kube: Kube) -> None:
    for name, app in (("a", "x"), ("b", "x"), ("c", "y")):
        kube.core.create_namespaced_config_map(kube.namespace, config_map(name, labels={"app": app}))

    def names(**selectors: str) -> str:
        items = kube.core.list_namespaced_config_map(kube.namespace, **selectors).items
        return "".join(item.metadata.name for item in items)

    assert (names(label_selector="app=x"), names(label_selector="app notin (x)")) == ("ab", "c")
    assert names(field_selector="metadata.name!=a", label_selector="app=x") == "b"
    with pytest.raises(exceptions.ApiException, match="field label not supported"):
        names(field_selector="data.k=v")


def test_lists_come_in_consistent_pages(kube: Kube) -> None:
    for index in range(5):
        kube.core.create_namespaced_config_map(kube.namespace, config_map(f"c{index}"))
    first = kube.core.list_namespaced_config_map(kube.namespace, limit=2)
    assert first.metadata.remaining_item_count == 3
    kube.core.delete_namespaced_config_map("c3", kube.namespace)
    kube.core.create_namespaced_config_map(kube.namespace, config_map("c9"))
    kube.core.patch_namespaced_config_map("c2", kube.namespace, {"data": {"later": "1"}})
    rest = kube.core.list_namespaced_config_map(kube.namespace, limit=9, _continue=first.metadata._continue)
    assert [item.metadata.name for item in rest.items] == ["c2", "c3", "c4"]
    assert rest.items[0].data is None
    with pytest.raises(exceptions.ApiException, match="continue key is not valid"):
        kube.core.list_namespaced_config_map(kube.namespace, limit=1, _continue="nonsense")


def test_requests_without_a_token_are_refused(kube: Kube) -> None:
    for token in ("", "Bearer bad"):
        code, body, _ = kube.call("GET", "/api/v1/pods", token=token)
        assert (code, body["reason"]) == (401, "Unauthorized")
    assert kube.call("GET", "/livez", token="")[0] == 200
    with pytest.raises(exceptions.UnauthorizedException):
        client.CoreV1Api(make_client(kube.url, kube.authority, "Bearer bad")).list_node()


@pytest.mark.parametrize(
    ("path", "body", "code", "text"),
    [
        (CONFIG_MAPS, {"metadata": {"name": "a"}, "dat": {}}, 400, 'unknown field "dat"'),
        (CONFIG_MAPS, {"metadata": {"name": "A_b"}}, 422, "RFC 1123"),
        (CONFIG_MAPS, {"metadata": {}}, 422, "name or generateName is required"),
        (CONFIG_MAPS, {"metadata": {"name": "a"}, "kind": "Pod"}, 400, "must be of type ConfigMap"),
        (CONFIG_MAPS, {"metadata": {"name": "a", "namespace": "other"}}, 400, "does not match"),
        (CONFIG_MAPS, {"metadata": {"name": "a", "resourceVersion": "1"}}, 400, "should not be set"),
        (CONFIG_MAPS, {"metadata": {"name": "a", "labels": {"k": "-"}}}, 422, "valid label"),
        (CONFIG_MAPS, {"metadata": {"name": "a", "labels": {"k": 1}}}, 400, "type string"),
        (CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"a b": ""}}, 422, "config key"),
        (CONFIG_MAPS, [], 400, "expected an object"),
        (CONFIG_MAPS, b"{", 400, "unrecognized"),
        (CONFIG_MAPS, b'{"metadata": {"name": "a", "name": "b"}}', 400, "duplicate field"),
        ("/api/v1/namespaces/nowhere-{}/configmaps", {"metadata": {"name": "a"}}, 404, "namespaces"),
        ("/api/v1/namespaces/{}/widgets", {"metadata": {"name": "a"}}, 404, "could not find the requested resource"),
        (SERVICES, {"metadata": {"name": "1a"}, "spec": {"ports": [{"port": 1}]}}, 422, "1035"),
        (SERVICES, {"metadata": {"name": "a"}, "spec": {}}, 422, "spec.ports"),
        (SERVICES, {"metadata": {"name": "a"}, "spec": {"type": "NodePort"}}, 501, "not emulated"),
    ],
)  # fmt: skip
def test_bad_objects_are_refused(kube: Kube, path: str, body: Any, code: int, text: str) -> None:
    status, answer, _ = kube.call("POST", path.format(kube.namespace), body)
    assert (status, answer["kind"], answer["code"]) == (code, "Status", code), answer
    assert text in answer["message"]


def job_with(**changes: Any) -> dict[str, Any]:
    """A job with changes at dotted paths; `container__x` is the first container's field."""
    job = make_job("a", **SUSPENDED)
    for path, value in changes.items():
        *steps, last = path.split("__")
        target = job["spec"]
        if steps and steps[0] in ("pod", "container"):
            target = job["spec"]["template"]["spec"]
            target = target["containers"][0] if steps[0] == "container" else target
            steps = steps[1:]
        for step in steps:
            target = target.setdefault(step, {})
        target[last] = value
    return job


SHORT = {
    "C.": "spec.template.spec.containers[0].",
    "P.": "spec.template.spec.",
    "F.": "spec.podFailurePolicy.",
}


def ephemeral(metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A job whose pod has an ephemeral volume; `spec` is part of its claim."""
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}, **spec}
    template = {"metadata": metadata or {}, "spec": claim}
    return {"pod__volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]}


def exit_rule(**codes: Any) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42], **codes}}


EXIT_RULE = exit_rule()
GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pod__restartPolicy": "Always"}, "P.restartPolicy"),
        ({"pod__restartPolicy": "Sometimes"}, "P.restartPolicy"),
        ({"podFailurePolicy": {"rules": [EXIT_RULE]}, "pod__restartPolicy": "OnFailure"}, "P.restartPolicy"),
        ({"podFailurePolicy": {"rules": [{"action": "Ignore"}]}}, "F.rules[0]"),
        ({"podFailurePolicy": {"rules": [{**EXIT_RULE, "action": "FailIndex"}]}}, "F.rules[0].action"),
        ({"podFailurePolicy": {"rules": [{**EXIT_RULE, "action": "Panic"}]}}, "F.rules[0].action"),
        ({"podFailurePolicy": {"rules": [EXIT_RULE]}, "podReplacementPolicy": "TerminatingOrFailed"},
         "spec.podReplacementPolicy"),
        ({"podFailurePolicy": {"rules": [exit_rule(values=[0])]}},
         "F.rules[0].onExitCodes.values[0]"),
        ({"podFailurePolicy": {"rules": [exit_rule(containerName="b")]}},
         "F.rules[0].onExitCodes.containerName"),
        ({"completionMode": "Indexed", "parallelism": 2}, "spec.completions"),
        ({"parallelism": -1}, "spec.parallelism"),
        ({"backoffLimit": -1}, "spec.backoffLimit"),
        ({"selector": {"matchLabels": {"a": "b"}}, "manualSelector": True}, "spec.template.metadata.labels"),
        ({"pod__containers": []}, "P.containers"),
        ({"container__name": "Main"}, "C.name"),
        ({"container__image": ""}, "C.image"),
        ({"container__env": [{"name": "1A", "value": "x"}]}, "C.env[0].name"),
        ({"container__env": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
         "C.env[0].valueFrom"),
        ({"container__env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.foo"}}}]},
         "C.env[0].valueFrom.fieldRef.fieldPath"),
        ({"container__env": [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "k"}}}]},
         "C.env[0].valueFrom.secretKeyRef.name"),
        ({"container__volumeMounts": [{"name": "v", "mountPath": "/v"}]}, "C.volumeMounts[0].name"),
        ({"container__ports": [{"containerPort": 70000}]}, "C.ports[0].containerPort"),
        ({"container__resources": {"limits": {GPU: "1"}, "requests": {GPU: "2"}}}, "C.resources.requests"),
        ({"container__resources": {"requests": {GPU: "2"}}}, "C.resources.limits"),
        ({"container__resources": {"limits": {GPU: "1500m"}}}, "C.resources.limits[nvidia.com/gpu]"),
        ({"container__resources": {"limits": {"gpu": "1"}}}, "C.resources.limits[gpu]"),
        ({"container__resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}}, "C.resources.requests"),
        ({"container__livenessProbe": {}}, "C.livenessProbe"),
        ({"container__livenessProbe": {"tcpSocket": {"port": 1}, "successThreshold": 2}},
         "C.livenessProbe.successThreshold"),
        ({"pod__volumes": [{"name": "v"}]}, "P.volumes[0]"),
        ({"pod__volumes": [{"name": "v", "ephemeral": {}}]}, "P.volumes[0].ephemeral.volumeClaimTemplate"),
        (ephemeral(accessModes=[]), "P.volumes[0].ephemeral.volumeClaimTemplate.spec.accessModes"),
        (ephemeral(accessModes=["Often"]), "P.volumes[0].ephemeral.volumeClaimTemplate.spec.accessModes[0]"),
        (ephemeral(resources={}), "P.volumes[0].ephemeral.volumeClaimTemplate.spec.resources[storage]"),
        (ephemeral(resources={"requests": {"storage": "0"}}),
         "P.volumes[0].ephemeral.volumeClaimTemplate.spec.resources[storage]"),
        (ephemeral({"name": "n"}), "P.volumes[0].ephemeral.volumeClaimTemplate.metadata.name"),
        ({"pod__volumes": [{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]}, "P.volumes[0].secret"),
        ({"pod__volumes": [{"name": "v", "emptyDir": {"medium": "Disk"}}]}, "P.volumes[0].emptyDir.medium"),
        ({"pod__volumes": [{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]}, "P.volumes[1].name"),
        ({"pod__nodeSelector": {"a b": "c"}}, "P.nodeSelector"),
        ({"pod__tolerations": [{"operator": "Equal"}]}, "P.tolerations[0].operator"),
        ({"pod__terminationGracePeriodSeconds": -1}, "P.terminationGracePeriodSeconds"),
        ({"pod__hostname": "a.b"}, "P.hostname"),
    ],
)  # fmt: skip
def test_bad_jobs_are_invalid_with_causes(kube: Kube, changes: dict[str, Any], field: str) -> None:
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs"
    for short, full in SHORT.items():
        field = field.replace(short, full) if field.startswith(short) else field
    code, body, _ = kube.call("POST", path, job_with(**changes))
    assert (code, body["reason"]) == (422, "Invalid"), body
    assert field in causes(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"pod__affinity": {}},
        {"backoffLimitPerIndex": 1},
        {"container__livenessProbe": {"grpc": {"port": 80}}},
        {"container__lifecycle": {"postStart": {"exec": {"command": ["true"]}}}},
        {"container__ports": [{"containerPort": 1, "hostPort": 1}]},
        {"pod__volumes": [{"name": "v", "projected": {}}]},
    ],
)
def test_unemulated_features_are_refused_with_501(kube: Kube, changes: dict[str, Any]) -> None:
    code, body, _ = kube.call("POST", f"/apis/batch/v1/namespaces/{kube.namespace}/jobs", job_with(**changes))
    assert (code, body["reason"]) == (501, "NotImplemented")
    assert "is not emulated by the local stack" in body["message"]


def test_gpus_need_a_type_on_autopilot(kube: Kube) -> None:
    with pytest.raises(exceptions.ApiException) as refused:
        kube.batch.create_namespaced_job(kube.namespace, job_with(container__resources={"limits": {GPU: "1"}}))
    assert refused.value.status == 400
    assert "autogke-gpu-limitation" in str(refused.value.body)


@pytest.mark.parametrize(
    ("requests", "compute_class", "most"),
    [
        ({"cpu": "31"}, "", "30"),
        ({"memory": "111Gi"}, "", "110Gi"),
        ({"memory": "852Gi"}, "Balanced", "851Gi"),
        ({"cpu": "222", "memory": "851Gi"}, "Balanced", None),
        ({"cpu": "30", "memory": "110Gi"}, "", None),
    ],
)
def test_autopilot_refuses_pods_larger_than_their_class(
    kube: Kube, requests: dict[str, str], compute_class: str, most: str | None
) -> None:
    selector = {"pod__nodeSelector": {"cloud.google.com/compute-class": compute_class}} if compute_class else {}
    job = job_with(container__resources={"requests": requests}, **selector)
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs?dryRun=All"
    code, body, _ = kube.call("POST", path, job)
    assert code == (201 if most is None else 400)
    assert most is None or f"is higher than the Autopilot maximum of '{most}'" in body["message"]


def test_unknown_fields_can_be_ignored_or_warned_about(kube: Kube) -> None:
    path = f"/api/v1/namespaces/{kube.namespace}/configmaps"
    code, body, headers = kube.call("POST", f"{path}?fieldValidation=Warn", {"metadata": {"name": "a"}, "dat": 1})
    assert (code, headers["Warning"]) == (201, '299 - "unknown field \\"dat\\""')
    assert "dat" not in body
    code, _, headers = kube.call("POST", f"{path}?fieldValidation=Ignore", {"metadata": {"name": "b"}, "dat": 1})
    assert (code, headers["Warning"]) == (201, None)


def test_job_templates_cannot_change(kube: Kube) -> None:
    kube.create_job("a", **SUSPENDED)
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "other"}]}}}}
    with pytest.raises(exceptions.UnprocessableEntityException) as refused:
        kube.batch.patch_namespaced_job("a", kube.namespace, patch)
    assert causes(answer_of(refused.value)) == ["spec.template"]


def test_patch_formats(kube: Kube) -> None:
    kube.apps.create_namespaced_deployment(kube.namespace, make_deployment("d", 0, env={"A": "1"}))
    path = f"/apis/apps/v1/namespaces/{kube.namespace}/deployments/d"
    steps = [{"op": "add", "path": "/metadata/labels", "value": {"json": "patch"}}]
    assert kube.call("PATCH", path, steps, "application/json-patch+json")[1]["metadata"]["labels"] == {"json": "patch"}
    env = {"spec": {"template": {"spec": {"containers": [{"name": "server", "env": [{"name": "B", "value": "2"}]}]}}}}
    merged = kube.call("PATCH", path, env, "application/strategic-merge-patch+json")[1]
    assert [variable["name"] for variable in merged["spec"]["template"]["spec"]["containers"][0]["env"]] == ["A", "B"]
    code, body, _ = kube.call("PATCH", path, env, "application/merge-patch+json")
    assert (code, causes(body)) == (422, ["spec.template.spec.containers[0].image"])
    assert kube.call("PATCH", path, env, "application/apply-patch+yaml")[0] == 422  # without a field manager
    assert kube.call("PATCH", path, env, "application/json")[0] == 415
    assert (
        kube.call("PATCH", path, [{"op": "test", "path": "/spec/replicas", "value": 9}], "application/json-patch+json")[
            0
        ]
        == 422
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "metadata",
                        "spec",
                        "template",
                        "containers",
                        "labels",
                        "name",
                        "selector",
                        "replicas",
                        "$patch",
                        "status",
                    ]
                ),
                inner,
                max_size=3,
            )
        ),
    ),
    st.sampled_from(["merge-patch", "strategic-merge-patch", "json-patch"]),
)
def test_wild_patches_never_break_the_server(kube: Kube, patch: Any, kind: str) -> None:
    kube.call("POST", f"/apis/apps/v1/namespaces/{kube.namespace}/deployments", make_deployment("wild", 0))
    path = f"/apis/apps/v1/namespaces/{kube.namespace}/deployments/wild?dryRun=All"
    code, body, _ = kube.call("PATCH", path, patch, f"application/{kind}+json")
    assert code in (200, 400, 404, 409, 422, 501), body


def test_bodies_have_a_limit(kube: Kube) -> None:
    data = {"metadata": {"name": "a"}, "data": {"k": "x" * (4 * 2**20)}}
    assert kube.call("POST", CONFIG_MAPS.format(kube.namespace), data)[0] == 413
    code, body, _ = kube.call("POST", CONFIG_MAPS.format(kube.namespace), {**data, "data": {"k": "x" * (2**20 + 1)}})
    assert (code, body["details"]["causes"][0]["reason"]) == (422, "FieldValueTooLong")


def test_scale_is_a_path_of_its_own(kube: Kube) -> None:
    kube.apps.create_namespaced_deployment(kube.namespace, make_deployment("d", 0))
    scale = kube.apps.read_namespaced_deployment_scale("d", kube.namespace)
    assert scale.spec.replicas == 0
    kube.apps.patch_namespaced_deployment_scale("d", kube.namespace, {"metadata": {"labels": {"x": "y"}}})
    scale = kube.apps.read_namespaced_deployment_scale("d", kube.namespace)
    assert kube.apps.replace_namespaced_deployment_scale("d", kube.namespace, scale).spec.replicas == 0


def test_finalizers_hold_an_object(kube: Kube) -> None:
    kube.core.create_namespaced_config_map(kube.namespace, config_map("a", finalizers=["x.org/hold"]))
    kube.core.delete_namespaced_config_map("a", kube.namespace)
    held = kube.core.read_namespaced_config_map("a", kube.namespace)
    assert held.metadata.deletion_timestamp is not None
    patch = {"metadata": {"finalizers": ["x.org/hold", "x.org/more"]}}
    with pytest.raises(exceptions.UnprocessableEntityException):
        kube.core.patch_namespaced_config_map("a", kube.namespace, patch)
    steps = [{"op": "remove", "path": "/metadata/finalizers/0"}]
    path = f"/api/v1/namespaces/{kube.namespace}/configmaps/a"
    assert kube.call("PATCH", path, steps, "application/json-patch+json")[0] == 200
    assert kube.call("GET", path)[0] == 404


def test_deletion_can_be_bound_to_a_uid(kube: Kube) -> None:
    made = kube.core.create_namespaced_config_map(kube.namespace, config_map("a"))
    options = {"preconditions": {"uid": "another"}}
    with pytest.raises(exceptions.ConflictException, match="the UID in the precondition"):
        kube.core.delete_namespaced_config_map("a", kube.namespace, body=options)
    options = {"preconditions": {"uid": made.metadata.uid}}
    assert kube.core.delete_namespaced_config_map("a", kube.namespace, body=options)["status"] == "Success"


def owned_by(owner: Any, name: str) -> dict[str, Any]:
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "blockOwnerDeletion": True,
    }
    return config_map(name, ownerReferences=[reference], finalizers=["x.org/hold"] if name == "held" else [])


@pytest.mark.parametrize("policy", ["Background", "Foreground", "Orphan"])
def test_dependents_follow_their_owner(kube: Kube, policy: str) -> None:
    owner = kube.core.create_namespaced_config_map(kube.namespace, config_map("owner"))
    kube.core.create_namespaced_config_map(kube.namespace, owned_by(owner, "child"))
    kube.core.delete_namespaced_config_map("owner", kube.namespace, propagation_policy=policy)

    def names() -> list[str]:
        return [item.metadata.name for item in kube.core.list_namespaced_config_map(kube.namespace).items]

    wanted = ["child"] if policy == "Orphan" else []
    kube.until(names, lambda names: names == wanted)
    if wanted:
        kube.until(
            lambda: kube.core.read_namespaced_config_map("child", kube.namespace),
            lambda child: not child.metadata.owner_references,
        )


def test_foreground_deletion_waits_for_dependents(kube: Kube) -> None:
    owner = kube.core.create_namespaced_config_map(kube.namespace, config_map("owner"))
    kube.core.create_namespaced_config_map(kube.namespace, owned_by(owner, "held"))
    kube.core.delete_namespaced_config_map("owner", kube.namespace, propagation_policy="Foreground")
    kube.until(
        lambda: kube.core.read_namespaced_config_map("held", kube.namespace),
        lambda held: held.metadata.deletion_timestamp,
    )
    assert kube.core.read_namespaced_config_map("owner", kube.namespace).metadata.finalizers == ["foregroundDeletion"]
    kube.core.patch_namespaced_config_map(
        "held", kube.namespace, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["x.org/hold"]}}
    )
    kube.until(lambda: kube.core.list_namespaced_config_map(kube.namespace).items, lambda items: not items)


def test_objects_of_unknown_owners_are_deleted(kube: Kube) -> None:
    owner = kube.core.create_namespaced_config_map(kube.namespace, config_map("owner"))
    kube.core.delete_namespaced_config_map("owner", kube.namespace)
    kube.core.create_namespaced_config_map(kube.namespace, owned_by(owner, "late"))
    kube.until(lambda: kube.core.list_namespaced_config_map(kube.namespace).items, lambda items: not items)


def test_collections_are_deleted_by_selector(kube: Kube) -> None:
    for name in "ab":
        kube.core.create_namespaced_config_map(kube.namespace, config_map(name, labels={"n": name}))
    kube.core.delete_collection_namespaced_config_map(kube.namespace, label_selector="n=a")
    assert [item.metadata.name for item in kube.core.list_namespaced_config_map(kube.namespace).items] == ["b"]


def test_namespaces_take_everything_with_them(running: Running) -> None:
    kube = running.kube()
    kube.create_job("a", "sleep", "600")
    kube.core.create_namespaced_config_map(kube.namespace, config_map("c"))
    kube.until(lambda: kube.pods(), lambda pods: pods and pods[0].status.phase == "Running")
    kube.core.delete_namespace(kube.namespace)
    with pytest.raises(exceptions.ForbiddenException, match="being terminated"):
        kube.core.create_namespaced_config_map(kube.namespace, config_map("late"))
    path = f"/api/v1/namespaces/{kube.namespace}"
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)
    assert not [name for name in kube.live() if kube.namespace in name]


def test_pods_need_their_service_account(kube: Kube) -> None:
    with pytest.raises(exceptions.ForbiddenException, match="error looking up service account"):
        kube.create_pod("a", serviceAccountName="trainer")
    kube.core.create_namespaced_service_account(kube.namespace, {"metadata": {"name": "trainer"}})
    assert kube.create_pod("a", serviceAccountName="trainer").spec.service_account_name == "trainer"


def test_pods_are_all_but_immutable(kube: Kube) -> None:
    kube.core.create_namespaced_pod(kube.namespace, make_pod("a", "sleep", "600"))
    with pytest.raises(exceptions.UnprocessableEntityException, match="pod updates may not change fields"):
        kube.core.patch_namespaced_pod("a", kube.namespace, {"spec": {"hostname": "b"}})
    kube.core.patch_namespaced_pod("a", kube.namespace, {"metadata": {"labels": {"l": "1"}}})


def test_immutable_secrets_do_not_change(kube: Kube) -> None:
    kube.core.create_namespaced_secret(
        kube.namespace, {"metadata": {"name": "s"}, "stringData": {"k": "v"}, "immutable": True}
    )
    with pytest.raises(exceptions.UnprocessableEntityException, match="immutable"):
        kube.core.patch_namespaced_secret("s", kube.namespace, {"stringData": {"k": "w"}})


def test_autoscalers_are_checked_and_kept(kube: Kube) -> None:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}
    metric: dict[str, Any] = {
        "type": "Pods",
        "pods": {"metric": {"name": "queue"}, "target": {"type": "AverageValue", "averageValue": "5"}},
    }
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 3, "metrics": [metric]}
    path = f"/apis/autoscaling/v2/namespaces/{kube.namespace}/horizontalpodautoscalers"
    assert kube.call("POST", path, {"metadata": {"name": "h"}, "spec": spec})[0] == 201
    code, body, _ = kube.call("POST", path, {"metadata": {"name": "i"}, "spec": {**spec, "maxReplicas": 0}})
    assert (code, causes(body)) == (422, ["spec.maxReplicas", "spec.maxReplicas"])
    for target, at in (
        ({"type": "AverageValue", "averageValue": "0"}, "averageValue"),
        ({"type": "AverageValue"}, "averageValue"),
        ({"averageValue": "5"}, "type"),
    ):
        bad = {**metric, "pods": {**metric["pods"], "target": target}}
        code, body, _ = kube.call("POST", path, {"metadata": {"name": "i"}, "spec": {**spec, "metrics": [bad]}})
        assert (code, causes(body)) == (422, [f"spec.metrics[0].pods.target.{at}"])


def test_pod_monitorings_are_checked_and_kept(kube: Kube) -> None:
    where = ("monitoring.googleapis.com", "v1", kube.namespace, "podmonitorings")
    spec = {"selector": {"matchLabels": {"app": "d"}}, "endpoints": [{"port": "http", "interval": "15s"}]}
    kube.custom.create_namespaced_custom_object(*where, make_monitoring("m", spec))
    assert kube.custom.get_namespaced_custom_object(*where, "m")["spec"] == spec
    path = f"/apis/monitoring.googleapis.com/v1/namespaces/{kube.namespace}/podmonitorings"
    for bad, at in (
        ({"selector": {}}, "spec.endpoints"),
        ({**spec, "endpoints": [{"path": "/metrics"}]}, "spec.endpoints[0].port"),
        ({**spec, "endpoints": [{"port": 8000, "interval": "often"}]}, "spec.endpoints[0].interval"),
        ({"endpoints": [{"port": 8000}]}, "spec.selector"),
    ):
        code, body, _ = kube.call("POST", path, make_monitoring("n", bad))
        assert (code, causes(body)) == (422, [at])
    kube.custom.delete_namespaced_custom_object(*where, "m")


def make_monitoring(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    kind = {"apiVersion": "monitoring.googleapis.com/v1", "kind": "PodMonitoring"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def test_calls_fail_on_purpose(kube: Kube) -> None:
    kube.faults(fail_next=[{"verb": "create", "resource": "configmaps", "code": 429, "retry_after": 1}])
    path = f"/api/v1/namespaces/{kube.namespace}/configmaps"
    code, body, headers = kube.call("POST", path, config_map("a"))
    assert (code, body["reason"], headers["Retry-After"]) == (429, "TooManyRequests", "1")
    kube.faults(fail_next={"verb": "create", "resource": "configmaps", "code": 504, "after_effect": True})
    assert kube.call("POST", path, config_map("a"))[0] == 504
    assert kube.call("POST", path, config_map("a"))[0] == 409
    kube.faults(fail_next={"verb": "get", "resource": "configmaps", "delay_seconds": 0.2, "count": 1})
    assert kube.call("GET", f"{path}/a")[0] == 200


@pytest.mark.parametrize(
    ("peer", "problem"),
    [
        ({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, ""),
        ({"ipBlock": {"cidr": "10.0.0.0"}}, ""),  # an address is a range of one
        ({"ipBlock": {"cidr": "all"}}, "spec.ingress[0].from[0].ipBlock.cidr"),
        ({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}, "spec.ingress[0].from[0].ipBlock.except[0]"),
        ({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "spec.ingress[0].from[0]"),
        ({}, "spec.ingress[0].from[0]"),
    ],
)
def test_network_policies_are_checked_and_stored(kube: Kube, peer: dict[str, Any], problem: str) -> None:
    path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
    spec = {"podSelector": {}, "ingress": [{"from": [peer], "ports": [{"port": 8000}]}]}
    name = f"policy-{uuid.uuid4().hex[:8]}"
    code, body, _ = kube.call("POST", path, {"metadata": {"name": name}, "spec": spec})
    if problem:
        assert (code, [cause["field"] for cause in body["details"]["causes"]]) == (422, [problem])
        return
    assert (code, body["spec"]["policyTypes"]) == (201, ["Ingress"])
    assert body["spec"]["ingress"][0]["ports"] == [{"port": 8000, "protocol": "TCP"}]


def test_discovery_lists_the_served_resources(kube: Kube) -> None:
    assert client.VersionApi(kube.api).get_code().git_version.startswith("v1.33")
    groups = {group.name for group in client.ApisApi(kube.api).get_api_versions().groups}
    assert groups == {
        "apps",
        "autoscaling",
        "batch",
        "coordination.k8s.io",
        "gateway.networking.k8s.io",
        "monitoring.googleapis.com",
        "networking.gke.io",
        "networking.k8s.io",
        "ray.io",
        "storage.k8s.io",
    }
    resources = {resource.name for resource in kube.batch.get_api_resources().resources}
    assert resources == {"jobs", "jobs/status"}
    assert kube.call("GET", "/openapi/v3/apis/batch/v1")[1]["components"]["schemas"]["Job"]["required"] == ["spec"]


@pytest.mark.parametrize("form", ["PartialObjectMetadata", "PartialObjectMetadataList"])
def test_clients_may_ask_for_metadata_alone(kube: Kube, form: str) -> None:
    kube.core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "a"}, "data": {"big": "x" * 1000}})
    accept = f"application/json;as={form};g=meta.k8s.io;v=v1"
    path = f"/api/v1/namespaces/{kube.namespace}/configmaps"
    code, item, _ = kube.call("GET", f"{path}/a", accept=accept)
    assert (code, item["kind"], item["apiVersion"]) == (200, "PartialObjectMetadata", "meta.k8s.io/v1")
    assert (item["metadata"]["name"], item.keys()) == ("a", {"kind", "apiVersion", "metadata"})
    listed = kube.call("GET", path, accept=accept)[1]
    assert (listed["kind"], listed["items"]) == ("PartialObjectMetadataList", [item])
    watched = kube.call("GET", f"{path}?watch=true&timeoutSeconds=1", accept=accept)[1]
    assert watched["object"]["kind"] == "PartialObjectMetadata"


@pytest.mark.parametrize("accept", ["application/vnd.kubernetes.protobuf", "text/html", "application/json;as=Drawing"])
def test_an_answer_that_the_client_does_not_accept_is_refused(kube: Kube, accept: str) -> None:
    code, status, _ = kube.call("GET", "/api/v1/namespaces", accept=accept)
    assert (code, status["reason"]) == (406, "NotAcceptable")
    assert kube.call("GET", "/api/v1/namespaces", accept=f"{accept}, application/json")[0] == 200


def test_a_lease_has_one_holder(kube: Kube) -> None:
    leases: Any = client.CoordinationV1Api(kube.api)
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-11-24T06:00:00.123456Z"}
    made = leases.create_namespaced_lease(kube.namespace, {"metadata": {"name": "leader"}, "spec": spec})
    assert (made.spec.holder_identity, made.spec.renew_time.microsecond) == ("a", 123456)
    made.spec.holder_identity = "b"
    assert leases.replace_namespaced_lease("leader", kube.namespace, made).spec.holder_identity == "b"
    made.spec.holder_identity = "c"
    with pytest.raises(exceptions.ApiException, match="the object has been modified"):
        leases.replace_namespaced_lease("leader", kube.namespace, made)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"k8s\x00", 400),
        (b"k8s\x00\x0a\xff\xff\xff", 400),
        (b"k8s\x00\x0a\x0b\x0a\x02v1\x12\x05Event", 501),
        (b"k8s\x00\x0a\x0c\x0a\x02v1\x12\x06Secret\x12\x02\x48\x01", 501),
    ],
)
def test_a_malformed_or_unknown_body_in_protobuf_is_refused(kube: Kube, body: bytes, code: int) -> None:
    path = f"/api/v1/namespaces/{kube.namespace}/secrets"
    assert kube.call("POST", path, body, "application/vnd.kubernetes.protobuf")[0] == code


def test_the_owner_may_do_everything(kube: Kube) -> None:
    reviews: Any = client.AuthorizationV1Api(kube.api)
    attributes = {"verb": "delete", "resource": "pods", "namespace": kube.namespace}
    answer = reviews.create_self_subject_access_review({"spec": {"resourceAttributes": attributes}})
    assert answer.status.allowed is True
    rules = reviews.create_self_subject_rules_review({"spec": {"namespace": kube.namespace}}).status
    assert rules.resource_rules[0].verbs == ["*"]
    with pytest.raises(exceptions.ApiException, match="exactly one of"):
        reviews.create_self_subject_access_review({"spec": {}})


def test_an_account_learns_what_it_may_do() -> None:
    """`refuse` is what the server asks for every request of an account (permissions.refusal)."""

    def refuse(target: Target, verb: str) -> str:
        return "" if (target.kind, verb) == (JOB, "get") else f"no {verb}"

    def ask(verb: str, group: str, resource: str) -> dict[str, Any]:
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": "n"}
        body = {"spec": {"resourceAttributes": attributes}}
        status: dict[str, Any] = review("SelfSubjectAccessReview", body, refuse)["status"]
        return status

    assert ask("get", "batch", "jobs") == {"allowed": True}
    assert ask("delete", "batch", "jobs") == {"allowed": False, "reason": "no delete"}
    assert "no resource 'boats'" in ask("get", "", "boats")["reason"]
    rules = review("SelfSubjectRulesReview", {"spec": {"namespace": "n"}}, refuse)["status"]["resourceRules"]
    assert rules == [{"verbs": ["get"], "apiGroups": ["batch"], "resources": ["jobs"]}]
