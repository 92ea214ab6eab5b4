"""Which code uses which protobuf messages (docs/decisions/records_are_messages.md).

Messages of calls stay at the edges: servicers, clients, the code that registers workers, and `*wire.py`. Records of the
log are used as they are stored, by the rooms that work on the log, and what is played (`play.proto`) as it is sent, by
the rooms that play it; all other code has types of our own.
"""

import ast
import re
from pathlib import Path

import millrace
from millrace_testing import syntax

ROOT = Path(millrace.__file__).parent
CALLS = re.compile(r"\b(\w+_service|env_worker)_pb2\b")
EDGES = {
    "client/": "the public client",
    "cli/commands/run/compare.py": "shows what the client answered, or the same made from files",
    "cli/commands/run/delete.py": "shows what the client answered",
    "cli/commands/run/usage.py": "shows what the client answered",
    "cli/view/records.py": "prints the same",
    "cli/view/output.py": "prints what the client answered",
    "readers/dashboard/answers.py": "makes the answers of ListMetrics, ListRollouts and GetLineage",
    "readers/beside.py": "answers these requests",
    "env_server/run.py": "serves",
    "env_server/service.py": "a servicer",
    "env_server/workers/env_worker.py": "the worker's end of its channel",
    "env_server/workers/worker_process.py": "the env-server's end of it",
    "inference/front.py": "a servicer",
    "inference/launcher.py": "maps vLLM's states to those of the service",
    "inference/settings.py": "registers",
    "inference/service.py": "a servicer",
    "orchestrator/": "servicers",
    "orchestrator/beside.py": "says what readers answer in the API",
    "orchestrator/drive/policy_driver.py": "a client of replicas",
    "orchestrator/drive/trainer_watch.py": "a client of replicas; reads what trainers say in their heartbeats",
    "orchestrator/why.py": "makes the answer of ExplainRun",
    "orchestrator/play/env_servers.py": "a client of env-servers",
    "orchestrator/new_run.py": "reads the requests of CreateRun and ForkRun",
    "orchestrator/workers.py": "a servicer",
    "rpc/serve.py": "registers",
    "rpc/worker.py": "registers",
    "trainer/serve.py": "serves",
    "trainer/worker.py": "a worker's heartbeat",
}
RECORDS = {
    "internal.v1.batch_pb2": """
        readers/dashboard readers/dashboard/views readers/exports orchestrator/drive orchestrator/play rollouts runlog
        readers/audit runlog/records runlog/redis readers/repair trainer trainer/checkpoint
        trainer/learning trainer/log
    """,
    "internal.v1.play_pb2": """
        cli/commands cli/session env_server env_server/adapters env_server/teacher env_server/workers
        orchestrator/drive orchestrator/play rollouts
    """,
    "internal.v1.policy_pb2": """
        inference orchestrator orchestrator/drive orchestrator/play readers/audit runlog runlog/redis trainer
        trainer/log trainer/publish
    """,
    "internal.v1.rollout_pb2": "env_server env_server/workers rollouts",
    "internal.v1.token_log_pb2": "rollouts",
    "internal.v1.tinker_pb2": "tinker",
    "v1.event_pb2": """
        cli/commands/run cli/evals cli/offline cli/session cli/view client readers/dashboard/views
        readers/exports orchestrator orchestrator/drive orchestrator/play rpc readers/audit runlog
        readers/repair trainer trainer/log trainer/publish
    """,
    "v1.run_pb2": """
        cli cli/commands/run cli/evals cli/offline cli/session cli/view client orchestrator orchestrator/drive
        rpc readers/audit runlog runlog/records
    """,
    # Answers about the log: made by one room, shown by another.
    "v1.audit_pb2": "cli/commands/run cli/offline client orchestrator readers readers/audit",
    "v1.checkpoint_pb2": "cli/view client orchestrator",
    "v1.lineage_pb2": "cli/view readers/dashboard",
    "v1.metric_pb2": "client readers/dashboard",
    "v1.rollout_pb2": "cli/view client readers/dashboard",
}
"""The rooms that use each module of records."""
_PACKAGE = re.compile(r"millrace\.((?:internal\.)?v1)(?:\.(\w+_pb2))?")


def _sources() -> dict[str, str]:
    """Return the text of every module that was not generated."""
    paths = [path for path in ROOT.rglob("*.py") if "_pb2" not in path.name]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def _importers() -> set[str]:
    return {name for name, source in _sources().items() if CALLS.search(source)}


def messages_imported(source: str) -> set[str]:
    """Return the modules of our messages that a module imports, such as `v1.event_pb2`."""
    found = set[str]()
    for node in syntax.walk(syntax.parse(source)):
        if isinstance(node, ast.ImportFrom) and (match := _PACKAGE.fullmatch(node.module or "")):
            package, module = match.groups()
            found |= {f"{package}.{module or name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            matches = [_PACKAGE.fullmatch(name.name) for name in node.names]
            found |= {f"{match[1]}.{match[2]}" for match in matches if match}
    return found


def test_messages_of_calls_stay_at_the_edges() -> None:
    inner = {name for name in _importers() if not name.endswith("wire.py")}
    assert len(inner) > 20
    assert not sorted(name for name in inner if not name.startswith(tuple(EDGES))), "use a type of our own"
    assert not sorted(edge for edge in EDGES if not any(name.startswith(edge) for name in inner)), "nothing needs these"


def test_an_import_of_such_messages_is_seen() -> None:
    assert CALLS.search("from millrace.internal.v1 import env_service_pb2, rollout_pb2")
    assert not CALLS.search("from millrace.internal.v1 import rollout_pb2")


def test_records_are_used_by_the_rooms_that_work_on_the_log() -> None:
    rooms: dict[str, set[str]] = {}
    for name, source in _sources().items():
        for module in messages_imported(source):
            if not CALLS.fullmatch(module.rpartition(".")[2]) and not module.endswith("_grpc"):
                rooms.setdefault(module, set()).add(name.rpartition("/")[0])
    wanted = {module: set(names.split()) for module, names in RECORDS.items()}
    assert rooms == wanted, "use a type of our own, or say here that the room works on the log"


def test_every_way_to_import_a_record_is_seen() -> None:
    ways = (
        "from millrace.v1 import event_pb2 as e",
        "from millrace.v1.event_pb2 import Event",
        "import millrace.v1.event_pb2 as e",
        "def f():\n    from millrace.v1 import event_pb2",
    )
    assert [messages_imported(way) for way in ways] == [{"v1.event_pb2"}] * len(ways)
    assert messages_imported("from millrace.internal.v1 import batch_pb2") == {"internal.v1.batch_pb2"}
