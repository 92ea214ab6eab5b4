"""Messages of calls stay at the edges: servicers, clients, the code that registers workers, and `*wire.py`.

Domain code uses our own types. What is stored (events, headers, rollouts) has its own protos, which are not looked at.
"""

import re
from pathlib import Path

import millrace

ROOT = Path(millrace.__file__).parent
CALLS = re.compile(r"\b(\w+_service|env_worker)_pb2\b")
EDGES = {
    "client/": "the public client",
    "cli/commands/run/lineage.py": "shows what the client answered, or the same made from files",
    "cli/view/lineage.py": "prints the same",
    "cli/view/output.py": "prints what the client answered",
    "dashboard/messages.py": "makes the answers of ListMetrics, ListRollouts and GetLineage",
    "env_server/run.py": "serves",
    "env_server/service.py": "a servicer",
    "env_server/workers/env_worker.py": "the worker's end of its channel",
    "env_server/workers/worker_process.py": "the env-server's end of it",
    "inference/launch/front.py": "a servicer",
    "inference/launch/launcher.py": "maps vLLM's states to those of the service",
    "inference/registration.py": "registers",
    "inference/replica_parts.py": "serves",
    "inference/service.py": "a servicer",
    "orchestrator/api/": "servicers",
    "orchestrator/drive/policy_driver.py": "a client of replicas",
    "orchestrator/drive/trainer_watch.py": "reads what trainers say in their heartbeats",
    "orchestrator/explain/why.py": "makes the answer of ExplainRun",
    "orchestrator/play/env_servers.py": "a client of env-servers",
    "orchestrator/runs/forks.py": "turns a ForkRun into a CreateRun",
    "orchestrator/runs/new_run.py": "reads the request of CreateRun",
    "orchestrator/workers.py": "a servicer",
    "rpc/registered.py": "registers",
    "rpc/worker.py": "registers",
    "trainer/serve.py": "serves",
    "trainer/worker.py": "a worker's heartbeat",
}


def _importers() -> set[str]:
    paths = [path for path in ROOT.rglob("*.py") if "_pb2" not in path.name]
    return {path.relative_to(ROOT).as_posix() for path in paths if CALLS.search(path.read_text())}


def test_messages_of_calls_stay_at_the_edges() -> None:
    inner = {name for name in _importers() if not name.endswith("wire.py")}
    assert len(inner) > 20
    assert not sorted(name for name in inner if not name.startswith(tuple(EDGES))), "use a type of our own"
    assert not sorted(edge for edge in EDGES if not any(name.startswith(edge) for name in inner)), "nothing needs these"


def test_an_import_of_such_messages_is_seen() -> None:
    assert CALLS.search("from millrace.internal.v1 import env_service_pb2, rollout_pb2")
    assert not CALLS.search("from millrace.internal.v1 import rollout_pb2")
