"""What Helm renders is what Kubernetes and the controllers take, as far as schemas say."""

import json
from pathlib import Path

import pytest

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "charts" / "millrace"
# Ours, for the fields that the chart uses; unknown fields are refused. The projects' own schemas are not carried here.
OWN = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
NEWEST = kubernetes_validate.latest_version()


def test_lint(helm, rendered):
    result = helm("lint", "--strict", str(CHART), "--values", str(CHART / "ci" / f"{rendered.case}-values.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version", [NEWEST, pytest.param("1.27", marks=pytest.mark.long)])
def test_objects_fit_their_schemas(rendered, version):
    for item in rendered.objects:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            name = f"{item['kind']}.{item['apiVersion'].replace('/', '_')}"
            assert name in OWN, f"{name}: neither Kubernetes nor tests/chart/schemas knows it"
            jsonschema.Draft202012Validator(OWN[name]).validate(item)


def test_pod_templates_of_other_controllers_fit_the_schema_of_a_pod(rendered):
    for pod in rendered.pods:
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": pod.labels}, "spec": pod.spec}
        kubernetes_validate.validate(item, NEWEST, strict=True)


def test_every_kind_is_rendered_by_some_case(render):
    cases = [path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")]
    kinds = {item["kind"] for case in cases for item in render(case).objects}
    assert {name.partition(".")[0] for name in OWN} <= kinds
    assert {"Ingress", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap"} <= kinds


def test_names_are_unique_and_short(rendered):
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 52 for _, name in names), "a StatefulSet's pods need ten more letters for their revision"


def test_the_longest_release_name_still_gives_valid_names(render):
    long = "a-release-name-that-is-much-too-long"
    made = render("multi-node", f"fullnameOverride={long[:30].rstrip('-')}")
    jobset = made.of_kind("JobSet")[0]["metadata"]["name"]
    assert len(f"{jobset}-worker-0-99-abcde") <= 63
