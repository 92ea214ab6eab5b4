"""`millrace run audit --store`: the audit of a recorded run without any server."""

import hashlib
import os
import subprocess
import sys

import pytest
import redis

from millrace.cli.commands.run.audit import audited_head
from millrace.runlog.names import Deployment
from millrace_testing.runlog.recorded_log import STEPS, audit, flip, record

TIMEOUT_S = 60.0


@pytest.fixture
async def run(log, redis, local_store):
    run = await record(log, redis, local_store)
    local_store.create(Deployment(log.names.prefix).name_object("demo"), log.uid.encode())
    return run


TRAINED = "  tasks         6 trained on, 4 dropped (run_ended 1, zero_advantage 3), 0 open\n"


def test_a_clean_run_with_and_without_redis(run, run_command, redis_url, tmp_path):
    (tmp_path / "redis.url").write_text(f"{redis_url}\n")
    for options in ((), ("--redis", redis_url), ("--redis", str(tmp_path / "redis.url"))):
        code, out, err = run_command("audit", run, *options)
        assert (code, err) == (0, "") and out.endswith("audit clean\n")
        assert TRAINED in out


def test_a_process_of_its_own_audits(run, redis_url):
    store = run.store.uri("x").removesuffix("/x")
    options = ("--store", store, "--prefix", run.names.prefix, "--redis", redis_url)
    done = subprocess.run(
        [sys.executable, "-m", "millrace.cli", "run", "audit", "demo", *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")},
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("audit clean\n")
    assert TRAINED in done.stdout


def test_a_damaged_run_exits_1(run, run_command, redis_url):
    flip(run, run.header(2).chunks[0].key)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(run.names.meta, "epoch:trainer", "7")
    code, out, _ = run_command("audit", run)
    assert code == 1 and "VIOLATION CHUNK_CORRUPT: chunk 0 of batch 2" in out and "EPOCH_AHEAD" not in out
    code, out, _ = run_command("audit", run, "--redis", redis_url)
    assert code == 1 and "VIOLATION EPOCH_AHEAD" in out and out.endswith("audit found 2 violations\n")


def test_several_processes_and_a_file_to_resume_from(run, run_command, tmp_path):
    code, out, err = run_command("audit", run, "--jobs", "2", "--resume", str(tmp_path / "audit.jsonl"))
    assert (code, err) == (0, "") and TRAINED in out and out.endswith("audit clean\n")
    assert list(tmp_path.glob("*.jsonl")) == [], "a complete audit leaves nothing"
    code, _, err = run_command("audit", run, "--resume", str(tmp_path / "nowhere" / "audit.jsonl"))
    assert code != 0 and "which is to keep what the audit has read, cannot be opened" in err


def test_a_run_that_is_not_there_exits_3(run, run_command):
    code, _, err = run_command("audit", run, "--prefix", "nobody")
    assert code == 3 and "holds no run 'demo'" in err


def test_a_deep_audit_reads_the_weights_and_says_what_it_did_not_do(run, run_command):
    code, out, err = run_command("audit", run, "--deep")
    assert (code, err) == (0, "") and " MB of weights and checkpoints read" in out
    assert "no step was computed again (--replay N) [NOT_REPLAYED]" in out and "[REDIS]" in out
    (key, *_) = [info.key for info in run.store.list(run.names.policies) if info.key.endswith(".safetensors")]
    flip(run, key)
    assert run_command("audit", run)[0] == 0, "which the fast audit does not read"
    code, out, _ = run_command("audit", run, "--deep")
    assert code == 1 and "VIOLATION POLICY_OBJECT_CORRUPT: policy 0-0" in out and run.store.uri(key) in out


def test_an_attestation_is_written_kept_and_checked(run, run_command, tmp_path):
    key, kept = tmp_path / "key", tmp_path / "kept.json"
    key.write_bytes(b"secret" * 8)
    code, out, err = run_command("attest", run, "--key", str(key), "--out", str(kept))
    assert (code, err) == (0, "") and kept.read_text() == out and "secret" not in out
    assert run.store.get(run.names.attestation(1)) == kept.read_bytes()
    options = ("--attestation", str(kept), "--attest-key", str(key))
    code, out, _ = run_command("audit", run, *options)
    assert code == 0 and "2 attestations checked" in out
    run.store.delete(run.names.attestation(1))
    code, out, _ = run_command("audit", run, *options)
    assert code == 1 and "VIOLATION ATTESTATION_MISSING" in out
    key.write_bytes(b"another" * 8)
    code, out, _ = run_command("audit", run, *options)
    assert code == 1 and "VIOLATION SIGNATURE_WRONG" in out
    key.write_bytes(b"short")
    code, out, err = run_command("audit", run, *options)
    assert code == 2 and "a key has 32 to" in err and "Traceback" not in err


def test_a_damaged_run_is_not_attested(run, run_command, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"secret" * 8)
    flip(run, run.header(2).chunks[0].key)
    code, _, err = run_command("attest", run, "--key", str(key))
    assert code != 0 and "CHUNK_CORRUPT" in err and run.store.head(run.names.attestation(1)) is None


async def test_what_is_attested_is_the_seal_that_was_audited(run):
    """Another one in its place a moment later is not what the signer has looked at."""
    audited = run.store.get(run.names.seal(0))
    report = await audit(run, offline=True)
    run.store.put(run.names.seal(0), audited.replace(b"SUCCEEDED", b"CANCELLED"))
    head = audited_head(run.names, report)
    assert head.seal_sha256 == hashlib.sha256(audited).hexdigest()
    assert (head.step, head.chain_hash) == (STEPS, run.chains[-1].hex())
