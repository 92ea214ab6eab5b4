"""Errors as `google.rpc.Status`: foreign statuses, broken details, bounds. The round trip is an integration test."""

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from millrace import errors
from millrace.rpc import status
from millrace.rpc.worker import to_proto
from millrace.telemetry.waits import Wait


def failed(code: grpc.StatusCode, details: str, *trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


@pytest.mark.parametrize(
    ("code", "cls", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError, "UNREACHABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.UnavailableError, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError, "CANCELLED"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InternalError, "UNIMPLEMENTED"),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidSpecError, "SPEC_INVALID"),
        (grpc.StatusCode.OUT_OF_RANGE, errors.InvalidStateError, "OUT_OF_RANGE"),
        (grpc.StatusCode.NOT_FOUND, errors.NotFoundError, "NOT_FOUND"),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError, "PERMISSION_DENIED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError, "RESOURCE_EXHAUSTED"),
        (grpc.StatusCode.UNKNOWN, errors.InternalError, "UNKNOWN"),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError, "DATA_LOSS"),
        (grpc.StatusCode.INTERNAL, errors.InternalError, "INTERNAL"),
    ],
)
def test_a_status_that_is_not_ours_becomes_the_class_of_its_code(code, cls, reason) -> None:
    error = status.from_rpc_error(failed(code, "some details"), to="redis-proxy", timeout_s=3)
    assert (type(error), error.reason) == (cls, reason)
    assert "some details" in str(error) or "within 3 s" in str(error)


def test_broken_details_leave_code_and_message() -> None:
    broken = failed(grpc.StatusCode.NOT_FOUND, "no run x", ("grpc-status-details-bin", b"\xff\xff\xff"))
    error = status.from_rpc_error(broken)
    assert isinstance(error, errors.NotFoundError)
    assert "no run x" in error.message


def test_details_of_another_domain_are_foreign() -> None:
    foreign = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message="txn")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="TXN", domain="spanner.googleapis.com"))
    error = status.from_status(foreign)
    assert (type(error), error.reason) == (errors.ConflictError, "ABORTED")


def test_an_unknown_class_with_a_known_code_becomes_the_parent() -> None:
    newer = status.to_status(errors.FencedError("x"))
    info = error_details_pb2.ErrorInfo()
    newer.details[0].Unpack(info)
    info.metadata["millrace-class"] = "QuantumFencedError"
    newer.details[0].Pack(info)
    assert type(status.from_status(newer)) is errors.ConflictError


def test_a_class_that_contradicts_the_code_is_not_believed() -> None:
    odd = status.to_status(errors.NotFoundError("x"))
    odd.code = grpc.StatusCode.UNAVAILABLE.value[0]
    assert type(status.from_status(odd)) is errors.UnavailableError


def test_details_are_the_documented_ones() -> None:
    error = errors.InvalidSpecError([errors.Violation(field="a.b", message="must be > 0")], reason="LR_BAD")
    found = status.to_status(error, request_id="r1")
    types = [detail.type_url.rsplit(".", 1)[1] for detail in found.details]
    assert types == ["ErrorInfo", "BadRequest", "RequestInfo"]
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    found.details[0].Unpack(info)
    found.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("LR_BAD", "millrace")
    assert [(violation.field, violation.description) for violation in bad.field_violations] == [("a.b", "must be > 0")]
    assert [d.type_url.rsplit(".", 1)[1] for d in status.to_status(errors.UnavailableError("x")).details] == [
        "ErrorInfo",
        "RetryInfo",
    ]


def test_the_largest_error_fits_into_the_metadata() -> None:
    long = "\N{GRINNING FACE}" * 5000
    violations = [errors.Violation(field=long, value=long, message=long, source=long) for _ in range(500)]
    metadata = {f"key-{index}-{long}": long for index in range(500)}
    found = status.to_status(errors.InvalidSpecError(violations, reason="X", remedy=long, metadata=metadata))
    assert len(found.SerializeToString()) * 4 / 3 < status.MAX_METADATA_BYTES  # binary headers travel as base64


def test_waits_on_the_wire() -> None:
    waits = [
        Wait(owner="trainer-0", reason="batch 12", waits_on="orchestrator", age_s=2.5, deadline_s=60.0),
        Wait(owner="trainer-0", reason="idle"),
    ]
    first, second = to_proto(waits)
    assert (first.owner, first.reason, first.waits_on) == ("trainer-0", "batch 12", "orchestrator")
    assert (first.age_seconds, first.deadline_seconds, first.run_uid) == (2.5, 60.0, "")
    assert (second.owner, second.reason) == ("trainer-0", "idle")
