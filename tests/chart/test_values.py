"""values.yaml, its schema, and what bad values are told."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "millrace"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(TEXT)
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
# Maps whose keys are the user's own.
_FREE = re.compile(
    r"(labels|Labels|annotations|Annotations|affinity|nodeSelector|vllmFlags|requests|limits|tlsConfig|issuerRef)$"
)


def _tables(value, path=()):
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from _tables(item, (*path, key))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inference.replica=3", "inference: Additional property replica is not allowed"),
        ("trainer.gang=mpi", 'trainer.gang must be one of the following: "statefulset", "jobset"'),
        ("inference.engine=sglang", 'inference.engine must be one of the following: "embedded", "vllm"'),
        ("trainer.gpu.count=-1", "trainer.gpu.count: Must be greater than or equal to 0"),
        ("envServer.replicas=two", "envServer.replicas: Invalid type. Expected: integer, given: string"),
        ("redis.url=redis://:hunter2@host:6379", "redis.url: Does not match pattern"),
        ("prefix=Has/Slash", "prefix: Does not match pattern"),
        ("security.runAsUser=0", "security.runAsUser: Must be greater than or equal to 1"),
        ("envServer.environments.packages={--index-url=http://x}", "envServer.environments.packages.0"),
        ("redis.bundled.enabled=false", "redis.existingSecret (with the whole URL) or redis.url has to be set"),
        ("tls.enabled=true", "tls.enabled needs tls.existingSecret, or tls.certManager.enabled"),
        ("auth.existingSecret=x", "sends tokens in plain text; enable TLS"),
        ("inference.nodes=2", "inference.nodes above 1 needs inference.engine vllm"),
        ("trainer.nodes=2,trainer.replicas=2", "trainer.replicas has to be 1"),
        ("inference.autoscaling.enabled=true", "needs inference.autoscaling.prometheusUrl"),
        (
            "envServer.autoscaling.enabled=true,envServer.autoscaling.kind=keda",
            "needs envServer.autoscaling.prometheusUrl",
        ),
        (
            "monitoring.metrics.enabled=false,monitoring.prometheusRule.enabled=true",
            "monitoring.prometheusRule looks at",
        ),
        ("monitoring.serviceMonitor.enabled=true", "serviceMonitor.enabled needs networkPolicy.metricsClients"),
        ("trainer.exampleModel.enabled=false", "helmTest.run needs trainer.exampleModel.enabled"),
        ("orchestrator.ingress.enabled=true", "orchestrator.ingress.enabled needs a host"),
        ("orchestrator.dashboard.ingress.enabled=true", "orchestrator.dashboard.ingress.enabled needs a host"),
        ("orchestrator.dashboard.ingress.enabled=true", "ingress.enabled needs auth.existingSecret: without tokens"),
        ("orchestrator.dashboard.service.type=LoadBalancer", "service.type LoadBalancer shows every run's samples"),
        ("orchestrator.dashboard.ingress.enabled=true", "ingress.enabled needs networkPolicy.dashboardClients"),
        (
            "orchestrator.dashboard.ingress.enabled=true,orchestrator.dashboard.enabled=false",
            "ingress.enabled needs orchestrator.dashboard.enabled",
        ),
        (
            "orchestrator.dashboard.ingress.enabled=true,tls.requireClientCertificates=true",
            "requireClientCertificates shuts out orchestrator.dashboard.ingress",
        ),
        ("monitoring.traces.endpoint=collector:4318", "monitoring.traces.endpoint: Does not match pattern"),
        ("monitoring.traces.existingSecret=x", "monitoring.traces.existingSecret needs monitoring.traces.endpoint"),
        ("envServer.pythons={venvs}", "envServer.pythons.0: Does not match pattern"),
        ("envServer.pools[0].name=own", "envServer.pools.0: image is required"),
        (
            "envServer.pools[0].name=own,envServer.pools[0].image.repository=own",
            "envServer.pools: own needs image.repository and image.tag or image.digest",
        ),
        (
            "envServer.pools[0].name=a,envServer.pools[0].image.repository=x,envServer.pools[0].image.tag=v1,"
            "envServer.pools[1].name=a,envServer.pools[1].image.repository=y,envServer.pools[1].image.tag=v1",
            "envServer.pools has two that are called a",
        ),
        ("orchestrator.replicas=2", "orchestrator: Additional property replicas is not allowed"),
    ],
)
def test_bad_values_are_refused_and_named(helm, given, message):
    result = helm("template", "demo", str(CHART), "--set", given)
    assert result.returncode != 0
    assert message in result.stderr
    assert "nil pointer" not in result.stderr


def test_everything_that_is_wrong_is_said_at_once(helm):
    result = helm("template", "demo", str(CHART), "--set", "redis.bundled.enabled=false,tls.enabled=true")
    assert result.stderr.count("  - ") >= 3


def test_the_defaults_fit_the_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    VALIDATOR.validate(VALUES)


@pytest.mark.parametrize("path", [path for path in _tables(VALUES) if not path or not _FREE.search(path[-1])])
def test_unknown_keys_are_refused_everywhere(path):
    values = copy.deepcopy(VALUES)
    table = values
    for key in path:
        table = table[key]
    table["nonsenze"] = 1
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(values)


def test_the_schema_knows_no_key_that_values_lack():
    def check(schema, value, path):
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        optional = {"global"} if not path else set()
        if path[:1] == ("redis",) or path[:1] == ("objectStore",):
            optional |= {"livenessSeconds"} if path[-1] == "probes" else set()
        if isinstance(value, dict) and "properties" in schema and value:
            missing = set(schema["properties"]) - set(value) - optional
            assert not missing, f"{'.'.join(path)}: {sorted(missing)} is not in values.yaml"
            for key, item in value.items():
                check(schema["properties"][key], item, (*path, key))

    check(SCHEMA, VALUES, ())


def test_values_are_commented():
    """Every top-level key, and at least every second line of a component's own keys, says what it is for."""
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"[a-z]\w*:", line) and line.partition(":")[0] not in ("image", "security", "monitoring", "tls"):
            before = next((text for text in reversed(lines[:number]) if text.strip()), "")
            after = lines[number + 1] if number + 1 < len(lines) else ""
            assert before.startswith("#") or after.strip().startswith("#"), f"line {number + 1}: {line}"


def test_every_value_is_used_by_a_template():
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    used = set(re.findall(r"\.([A-Za-z]\w*)", templates))
    for path in _tables(VALUES):
        table = VALUES
        for key in path:
            table = table[key]
        if path and (_FREE.search(path[-1]) or path[-1] == "resources"):
            continue  # copied as they are
        for key in table:
            assert key in used, f"{'.'.join((*path, key))} does nothing"


def test_gpus_without_an_image_that_can_use_them_are_refused(helm):
    made = helm("template", "m", str(CHART), "--set", "trainer.gpu.count=2,inference.gpu.count=1")
    assert made.returncode != 0
    assert "trainer.gpu.count is 2" in made.stderr and "inference.gpu.count is 1" in made.stderr
    assert "-cuda" in made.stderr
