"""`millrace run audit --store`: the audit of a recorded run by a process without any server."""

import asyncio
import hashlib
import os
import sys

import pytest

from millrace.cli.commands.run.attest import audited_head
from millrace.runlog.names import Deployment
from millrace_testing.runlog.recorded_log import STEPS, audit, flip, record

TIMEOUT_S = 60.0


@pytest.fixture
async def run(log, redis, local_store):
    run = await record(log, redis, local_store)
    local_store.create(Deployment(log.names.prefix).name_object("demo"), log.uid.encode())
    return run


async def millrace(run, *options: str, verb: str = "audit") -> tuple[int, str, str]:
    store = run.store.uri("x").removesuffix("/x")
    command = ("-m", "millrace.cli", "run", verb, "demo", "--store", store, "--prefix", run.names.prefix, *options)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")},
    )
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_clean_run_with_and_without_redis(run, redis_url, tmp_path):
    (tmp_path / "redis.url").write_text(f"{redis_url}\n")
    for options in ((), ("--redis", redis_url), ("--redis", str(tmp_path / "redis.url"))):
        code, out, err = await millrace(run, *options)
        assert (code, err) == (0, "") and out.endswith("audit clean\n")
        assert "  ordinals   6 trained, 4 dropped (run_ended 1, zero_advantage 3), 0 open\n" in out


async def test_a_damaged_run_exits_1(run, redis_url):
    flip(run, run.header(2).chunks[0].key)
    await run.redis.hset(run.names.meta, "epoch:trainer", 7)
    code, out, _ = await millrace(run)
    assert code == 1 and "VIOLATION CHUNK_CORRUPT: chunk 0 of step 2" in out and "EPOCH_AHEAD" not in out
    code, out, _ = await millrace(run, "--redis", redis_url)
    assert code == 1 and "VIOLATION EPOCH_AHEAD" in out and out.endswith("audit found 2 violations\n")


async def test_a_run_that_is_not_there_exits_3(run):
    code, _, err = await millrace(run, "--prefix", "nobody")
    assert code == 3 and "holds no run 'demo'" in err


async def test_a_deep_audit_reads_the_weights_and_says_what_it_did_not_do(run):
    code, out, err = await millrace(run, "--deep")
    assert (code, err) == (0, "") and " MB of weights and checkpoints read" in out
    assert "no step was computed again (--replay N) [NOT_REPLAYED]" in out and "[REDIS]" in out
    (key, *_) = [info.key for info in run.store.list(run.names.policies) if info.key.endswith(".safetensors")]
    flip(run, key)
    assert (await millrace(run))[0] == 0, "which the fast audit does not read"
    code, out, _ = await millrace(run, "--deep")
    assert code == 1 and "VIOLATION POLICY_OBJECT_CORRUPT: policy 0-0" in out and run.store.uri(key) in out


async def test_an_attestation_is_written_kept_and_checked(run, tmp_path):
    key, kept = tmp_path / "key", tmp_path / "kept.json"
    key.write_bytes(b"secret" * 8)
    code, out, err = await millrace(run, "--key", str(key), "--out", str(kept), verb="attest")
    assert (code, err) == (0, "") and kept.read_text() == out and "secret" not in out
    assert run.store.get(run.names.attestation(1)) == kept.read_bytes()
    options = ("--attestation", str(kept), "--attest-key", str(key))
    code, out, _ = await millrace(run, *options)
    assert code == 0 and "2 attestations checked" in out
    run.store.delete(run.names.attestation(1))
    code, out, _ = await millrace(run, *options)
    assert code == 1 and "VIOLATION ATTESTATION_MISSING" in out
    key.write_bytes(b"another" * 8)
    code, out, _ = await millrace(run, *options)
    assert code == 1 and "VIOLATION SIGNATURE_WRONG" in out
    key.write_bytes(b"short")
    code, out, err = await millrace(run, *options)
    assert code == 2 and "a key has 32 to" in err and "Traceback" not in err


async def test_a_damaged_run_is_not_attested(run, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"secret" * 8)
    flip(run, run.header(2).chunks[0].key)
    code, _, err = await millrace(run, "--key", str(key), verb="attest")
    assert code != 0 and "CHUNK_CORRUPT" in err and run.store.head(run.names.attestation(1)) is None


async def test_what_is_attested_is_the_seal_that_was_audited(run):
    """Another one in its place a moment later is not what the signer has looked at."""
    audited = run.store.get(run.names.seal(0))
    report = await audit(run, offline=True)
    run.store.put(run.names.seal(0), audited.replace(b"SUCCEEDED", b"CANCELLED"))
    head = audited_head(run.names, report)
    assert head.seal_sha256 == hashlib.sha256(audited).hexdigest()
    assert (head.step, head.chain_hash) == (STEPS, run.chains[-1].hex())
