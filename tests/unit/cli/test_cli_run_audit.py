"""`millrace run audit` and `millrace run fork`: what is sent, what is printed, and the exit codes."""

import json
from collections.abc import Iterator

import pytest

from millrace.cli.main import main
from millrace.cli.offline.audit import report_lines
from millrace.config.load import validate_document
from millrace.errors import InvalidStateError
from millrace.rpc.status import abort
from millrace.runlog.names import Deployment
from millrace.storage import open_store
from millrace.v1 import audit_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace_testing.runlog.fake_runs import FakeRuns, serving

CONFIG = {
    "model": {"name": "m"},
    "max_steps": 10,
    "run": {"name": "alpha"},
    "orchestrator": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 4, "batch_size": 8},
    "trainer": {"optim": {"lr": 1e-4}},
}


def clean() -> audit_pb2.AuditReport:
    return audit_pb2.AuditReport(
        run="runs/alpha",
        run_uid="uid-alpha",
        is_closed=True,
        num_steps=12,
        chain_hash="ab" * 32,
        num_trained=24,
        dropped={"zero_advantage": 2, "run_ended": 1},
        num_duplicates=2,
        num_rollouts=96,
        num_policies=13,
        num_lineages=1,
        num_events=240,
        num_writers=5,
        num_generations=2,
        epochs={"orchestrator": 2, "trainer": 3, "log": 2},
        notes=[audit_pb2.AuditFinding(check="CHUNKS_VERIFIED", message="12 chunks have the sha256")],
    )


class ForkingRuns(FakeRuns):
    """Also audits and forks."""

    def __init__(self) -> None:
        super().__init__()
        self.report = clean()
        self.forks: list[rs.ForkRunRequest] = []

    async def AuditRun(self, request, context):
        return rs.AuditRunResponse(report=self.report)

    async def ForkRun(self, request, context):
        if request.step > 10:
            error = InvalidStateError(
                "run 'alpha' cannot be forked at step 11: it keeps steps 0 to 10", remedy="choose a step in that range"
            )
            await abort(context, error)
        self.forks.append(request)
        return rs.ForkRunResponse(run=self.add(request.run_id or "alpha-at-7-abcd", run_pb2.RUN_STATE_QUEUED))


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[ForkingRuns]:
    servicer = ForkingRuns()
    monkeypatch.chdir(tmp_path)
    servicer.add("alpha").config_json = validate_document(CONFIG).resolved_json()
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        yield servicer


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["run", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_clean_audit_exits_0_and_says_what_there_is(server, capsys):
    code, out, err = run(capsys, "audit", "alph")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs/alpha (uid-alpha)",
        "  log           12 steps, closed",
        "  tasks         24 trained on, 3 dropped (run_ended 1, zero_advantage 2), 0 open",
        "  rollouts      96 kept, 2 late duplicates discarded",
        "  policies      13 versions in 1 lineage",
        "  events        240 of 5 writers",
        "  recovery      1 takeover of the orchestrator, 2 takeovers of the trainer, 1 rebuild of Redis",
        "  lost          0",
        "  counted twice 0",
        "  changed       0; chain hash abababababababab…",
        "  note          12 chunks have the sha256 [CHUNKS_VERIFIED]",
        "audit clean",
    ]


def test_a_violation_exits_1_and_is_printed(server, capsys):
    server.report.violations.add(check="HEADER_MISSING", message="header 3 does not exist")
    server.report.violations.add(check="CHUNK_CORRUPT", message="chunk 0 of step 4 (file:///c) is damaged")
    code, out, _ = run(capsys, "audit", "alpha")
    assert code == 1
    assert "  lost          1\n" in out and "  changed       1;" in out
    assert out.endswith(
        "VIOLATION HEADER_MISSING: header 3 does not exist\n"
        "VIOLATION CHUNK_CORRUPT: chunk 0 of step 4 (file:///c) is damaged\n"
        "audit found 2 violations\n"
    )


def test_json_holds_everything(server, capsys):
    code, out, _ = run(capsys, "audit", "alpha", "--json")
    document = json.loads(out)
    assert code == 0 and document["num_trained"] == "24" and document["violations"] == []
    server.report.violations.add(check="X", message="y")
    code, out, _ = run(capsys, "audit", "alpha", "--json")
    assert code == 1 and json.loads(out)["violations"] == [{"check": "X", "message": "y"}]


def test_a_run_that_needed_nothing(server):
    report = audit_pb2.AuditReport(run="runs/a", num_steps=1, first_step=5, epochs={"orchestrator": 1, "log": 1})
    lines = report_lines(report)
    assert "  recovery      none was needed" in lines and "  log           1 step from step 5 on, still open" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("audit",), "Missing argument 'RUN'"),
        (("audit", "alpha", "--redis", "redis://h:1/0"), "--redis and --prefix belong to --store"),
        (("audit", "alpha", "--store", "file:///x", "--server", "h:1"), "leave --server out"),
        (("fork",), "name the run to fork"),
        (("fork", "--step", "3"), "name the run to fork"),
        (("fork", "alpha"), "--step is missing"),
        (("fork", "alpha", "--step", "soon"), "--step must be a number, at least 0 (got 'soon')"),
        (("fork", "alpha", "--step", "3", "--trainer.optim.ler", "1"), "trainer.optim.ler"),
        (("fork", "alpha", "--step", "3", "--trainer.optim.lr", "-1"), "trainer.optim.lr"),
    ],
)
def test_usage_errors_exit_2(server, capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and message in err and out == ""
    assert server.forks == []


def test_a_run_that_does_not_exist_exits_3(server, capsys):
    assert run(capsys, "audit", "omega")[0] == 3
    assert run(capsys, "fork", "omega", "--step", "1")[0] == 3


def test_a_store_that_is_not_there(server, capsys, tmp_path):
    code, _, err = run(capsys, "audit", "alpha", "--store", f"file://{tmp_path}/nowhere")
    assert code == 2 and "is not there" in err
    assert not (tmp_path / "nowhere").exists()


def test_bad_addresses_name_their_option(tmp_path, capsys):
    code, _, err = run(capsys, "audit", "alpha", "--store", "nonsense://x")
    assert code == 2 and err.startswith("Error: --store: must begin with file:// or s3://")
    store = open_store(tmp_path.as_uri())
    store.put(f"{Deployment('millrace').names_prefix}alpha", b"uid-alpha")
    code, _, err = run(capsys, "audit", "alpha", "--store", tmp_path.as_uri(), "--redis", "nonsense://x")
    assert code == 2 and err.startswith("Error: --redis: must be redis://[user:password@]host:port/db")
    missing = tmp_path / "redis.url"
    code, _, err = run(capsys, "audit", "alpha", "--store", tmp_path.as_uri(), "--redis", str(missing))
    assert code == 2 and f"--redis {missing} is neither a URL nor a file that holds one: cannot be read" in err
    missing.write_text("hunter2hunter2")
    code, _, err = run(capsys, "audit", "alpha", "--store", tmp_path.as_uri(), "--redis", str(missing))
    assert code == 2 and "must be a URL" in err and "hunter2" not in err


def test_fork_sends_the_parents_config_with_the_changes_on_top(server, capsys):
    code, out, err = run(
        capsys, "fork", "alpha", "--step", "7", "--trainer.optim.lr", "1e-5", "--max-steps", "20", "--name", "beta"
    )
    assert (code, err) == (0, "")
    assert out == "runs/beta goes on from step 7 of runs/alpha; follow it: millrace run watch beta\n"
    [request] = server.forks
    assert (request.name, request.step, request.run_id) == ("runs/alpha", 7, "beta") and request.request_id
    sent = json.loads(request.config_json)
    assert sent["trainer"]["optim"]["lr"] == 1e-5
    assert sent["max_steps"] == sent["trainer"]["max_steps"] == sent["orchestrator"]["max_steps"] == 20
    assert sent["run"]["name"] is None, "names are unique"
    before = json.loads(server.runs["runs/alpha"].config_json)
    for section in (before, sent):
        for key in ("max_steps", "run"):
            del section[key]
        del section["trainer"]["optim"]["lr"], section["trainer"]["max_steps"], section["orchestrator"]["max_steps"]
    assert sent == before


def test_fork_reads_a_file_and_not_the_environment(server, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CONFIG__seed", "9")
    (tmp_path / "more.toml").write_text("max_steps = 30\n[trainer.loss]\nkl_tau = 0.5\n")
    code, out, _ = run(capsys, "fork", "alpha", "--step", "7", "@", "more.toml", "--trainer.loss.kl-tau", "0.25")
    assert code == 0 and "runs/alpha-at-7-abcd" in out
    sent = json.loads(server.forks[0].config_json)
    assert (sent["max_steps"], sent["seed"], sent["trainer"]["loss"]["kl_tau"]) == (30, 0, 0.25)
    assert server.forks[0].run_id == ""


def test_fork_dry_run(server, capsys):
    code, out, err = run(capsys, "fork", "alpha", "--step", "2", "--max-steps", "20", "--dry-run")
    assert code == 0 and json.loads(out)["max_steps"] == 20 and server.forks == []
    assert err == "dry run: nothing is made; left for the server to check: nothing more\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "9999", "--max-steps", "10000"), "cannot be forked at step 9999: it has 2 steps"),
        (("--step", "2", "--model.name", "other"), "trainer.model.name: must be 'm'"),
        (("--step", "1", "--trainer.optim.lr", "1e-5"), "changed: trainer.optim.lr"),
        (("--step", "2", "--max-steps", "2"), "max_steps: must be above 2"),
        (("--step", "2", "--name", "alpha"), "there is a run 'alpha' already"),
        (("--step", "2", "--name", "forkA"), "--name: lower-case letters, digits and '-', begins with a letter"),
    ],
)
def test_fork_dry_run_finds_what_the_server_would_refuse(server, capsys, arguments, message):
    code, out, err = run(capsys, "fork", "alpha", *arguments, "--dry-run")
    assert (code, out) == (2, "") and message in err
    assert server.forks == []


def test_an_illegal_name_comes_with_a_legal_one(server, capsys):
    _, _, err = run(capsys, "fork", "alpha", "--step", "2", "--name", "forkA")
    assert "(got 'forkA')" in err and "remedy: for example --name fork-a" in err


def test_a_step_that_is_not_kept(server, capsys):
    code, out, err = run(capsys, "fork", "alpha", "--step", "11", "--max-steps", "20")
    assert (code, out) == (2, "")
    assert err == (
        "Error: run 'alpha' cannot be forked at step 11: it keeps steps 0 to 10\n"
        "  remedy: choose a step in that range\n"
    )
