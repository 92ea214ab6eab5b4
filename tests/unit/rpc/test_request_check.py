"""Values that no field of a request may hold are named, all of them; everything else passes."""

import pytest

from millrace.errors import InvalidSpecError
from millrace.internal.v1 import play_pb2, policy_service_pb2, worker_service_pb2
from millrace.rpc.interceptors import MAX_ITEMS, MAX_NAME_CHARS, MAX_TEXT_CHARS, check_request
from millrace.v1 import event_pb2, run_service_pb2


def heartbeat(**wait) -> worker_service_pb2.HeartbeatRequest:
    return worker_service_pb2.HeartbeatRequest(worker_id="w", waits=[event_pb2.Wait(**wait)])


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (run_service_pb2.GetRunRequest(name="a\x00b"), "name", "control characters"),
        (run_service_pb2.GetRunRequest(name="a\x1b[2J"), "name", "control characters"),
        (run_service_pb2.GetRunRequest(name="x" * (MAX_NAME_CHARS + 1)), "name", f"at most {MAX_NAME_CHARS}"),
        (run_service_pb2.CancelRunRequest(reason="x" * (MAX_TEXT_CHARS + 1)), "reason", f"at most {MAX_TEXT_CHARS}"),
        (run_service_pb2.CreateRunRequest(labels={"a\n": "b"}), "labels (a key)", "control characters"),
        (run_service_pb2.CreateRunRequest(labels={"a": "b\n"}), "labels['a']", "control characters"),
        (run_service_pb2.ListRunsRequest(states=[1, 99]), "states[1]", "is no RunState"),
        (run_service_pb2.ListRunsRequest(states=[1] * (MAX_ITEMS + 1)), "states", f"at most {MAX_ITEMS}"),
        (heartbeat(age_seconds=float("nan")), "waits[0].age_seconds", "finite"),
        (heartbeat(age_seconds=float("-inf")), "waits[0].age_seconds", "finite"),
        (policy_service_pb2.UpdatePolicyRequest(inflight_mode=7), "inflight_mode", "is no InflightMode"),
        (
            play_pb2.PlayGroupRequest(sampling=play_pb2.Sampling(top_p=float("inf"))),
            "sampling.top_p",
            "finite",
        ),
    ],
)
def test_what_is_refused(request_, field: str, message: str):
    with pytest.raises(InvalidSpecError, match=message) as caught:
        check_request(request_)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.reason == "REQUEST_INVALID"


def test_every_wrong_field_is_named():
    request = run_service_pb2.CreateRunRequest(run_id="\x00", kind=44, request_id="\x7f", config_json="\x00" * 10)
    with pytest.raises(InvalidSpecError) as caught:
        check_request(request)
    assert [violation.field for violation in caught.value.violations] == ["run_id", "kind", "request_id"]


def test_what_passes():
    check_request(heartbeat(reason="line one\nline two\t\x1b[1m", age_seconds=1.5))
    check_request(run_service_pb2.CreateRunRequest(config_json="{}" * 200_000, labels={"ä": "ö"}))
    check_request(worker_service_pb2.HeartbeatRequest(trainer=worker_service_pb2.TrainerStatus(error_message="a\nb")))
    check_request(object())
