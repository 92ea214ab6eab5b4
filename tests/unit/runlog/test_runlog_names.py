"""The names of the log, literally: they are the stored format."""

import pytest

from millrace.errors import InvalidSpecError
from millrace.runlog.names import Deployment, Names, Stream, check_request_id, check_run_name, new_uid


def test_names_are_the_stored_format():
    names = Names("mill", "u1")
    assert [names.stream(stream) for stream in Stream] == [
        "mill:{u1}:rollouts",
        "mill:{u1}:batches",
        "mill:{u1}:policies",
        "mill:{u1}:events",
    ]
    assert (names.meta, names.lease("trainer")) == ("mill:{u1}:meta", "mill:{u1}:lease:trainer")
    assert names.run_json == "mill/runs/u1/run.json"
    assert names.epoch("orchestrator", 3) == "mill/runs/u1/epochs/orchestrator/00000003"
    assert names.intent(12) == "mill/runs/u1/intents/00000012.json"
    assert names.batch_header(7) == "mill/runs/u1/batches/00000007.pb"
    assert names.batch_data(7, 2, "ab") == "mill/runs/u1/batches/00000007/e00000002-ab/"
    assert names.rollout_data(7, 2, "ab") == "mill/runs/u1/rollouts/00000007/e00000002-ab/"
    assert names.policy_manifest(1, 20) == "mill/runs/u1/policies/0001-00000020/manifest.json"
    assert names.token_log(7, 1) == "mill/runs/u1/token_logs/00000007/0001.bin"
    assert names.checkpoint(20) == "mill/runs/u1/checkpoints/00000020/"
    assert names.tombstone == "mill/runs/u1/tombstone.json"
    deployment = Deployment("mill")
    assert deployment.runs_key == "mill:runs"
    assert deployment.name_object("a.b") == "mill/names/a.b"
    assert deployment.request_object("r-1") == "mill/requests/r-1"


def test_all_keys_of_a_run_are_in_one_cluster_slot():
    names = Names("mill", "u1")
    assert {key[key.index("{") + 1 : key.index("}")] for key in (*names.all_keys, names.lease("x"))} == {"u1"}
    assert "{" not in Deployment("mill").runs_key


@pytest.mark.parametrize("prefix", ["", "A", "a/b", "{a}", "a:b", "-a", "a" * 64])
def test_bad_prefixes(prefix):
    with pytest.raises(InvalidSpecError, match="MILLRACE_PREFIX"):
        Names(prefix, "u")


@pytest.mark.parametrize("uid", ["", "A", "a/b", "}", "a{", "..", "a" * 64])
def test_bad_uids(uid):
    with pytest.raises(InvalidSpecError, match="uid"):
        Names("mill", uid)


def test_uids_are_legal_unique_and_sort_by_creation():
    uids = [new_uid() for _ in range(1000)]
    assert len(set(uids)) == 1000
    assert [uid[:12] for uid in uids] == sorted(uid[:12] for uid in uids)
    Names("mill", uids[0])


def test_names_of_users_are_checked():
    assert check_run_name("My-run_1.2") == "My-run_1.2"
    assert check_request_id("0a1b-2c") == "0a1b-2c"
    for bad in ("", "a b", "../x", "a" * 64):
        with pytest.raises(InvalidSpecError, match=r"run\.name"):
            check_run_name(bad)
    for bad in ("", "a/b", "a" * 129):
        with pytest.raises(InvalidSpecError, match="request_id"):
            check_request_id(bad)
