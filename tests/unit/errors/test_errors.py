"""The tree, its table, and what survives a trip between processes."""

import copy
import pickle
import subprocess
import sys

import pytest

from millrace import errors
from millrace.errors import InvalidSpecError, MillraceError, Violation

TABLE = {
    "InvalidSpecError": ("INVALID_ARGUMENT", 2),
    "NotFoundError": ("NOT_FOUND", 3),
    "AlreadyExistsError": ("ALREADY_EXISTS", 2),
    "InvalidStateError": ("FAILED_PRECONDITION", 2),
    "ConflictError": ("ABORTED", 5),
    "FencedError": ("ABORTED", 5),
    "UnauthenticatedError": ("UNAUTHENTICATED", 4),
    "PermissionDeniedError": ("PERMISSION_DENIED", 4),
    "CapacityError": ("RESOURCE_EXHAUSTED", 5),
    "UnavailableError": ("UNAVAILABLE", 5),
    "LogGoneError": ("UNAVAILABLE", 5),
    "RefusedError": ("UNAVAILABLE", 5),
    "InternalError": ("INTERNAL", 1),
    "CorruptObjectError": ("INTERNAL", 1),
}


def make(cls: type[MillraceError]) -> MillraceError:
    if issubclass(cls, InvalidSpecError):
        violation = Violation(field="trainer.optim.lr", value="-1", message="must be > 0", source="rl.toml:12")
        return cls([violation], remedy="fix it", metadata={"run": "x"})
    return cls("no run x", reason="RUN_MISSING", remedy="list the runs", metadata={"run": "x"})


def test_every_class_has_the_code_and_exit_code_of_the_table() -> None:
    assert {cls.__name__: (cls.code, cls.exit_code) for cls in errors.error_classes()} == TABLE


def test_error_classes_names_parents_before_children() -> None:
    seen: set[type] = {MillraceError}
    for cls in errors.error_classes():
        assert set(cls.__bases__) <= seen
        seen.add(cls)


def test_str_is_message_and_remedy() -> None:
    assert str(errors.NotFoundError("no run x", remedy="list the runs")) == "no run x; list the runs"
    assert str(errors.NotFoundError("no run x")) == "no run x"


def test_reason_falls_back_to_that_of_the_class() -> None:
    assert errors.FencedError("lost").reason == "FENCED"
    assert errors.FencedError("lost", reason="EPOCH_OLD").reason == "EPOCH_OLD"


def test_only_what_a_retry_helps_has_a_delay() -> None:
    delayed = {cls.__name__ for cls in errors.error_classes() if make(cls).retry_after_s is not None}
    assert delayed == {"CapacityError", "UnavailableError", "LogGoneError", "RefusedError"}
    assert errors.CapacityError("full", retry_after_s=0.5).retry_after_s == 0.5


def test_invalid_spec_lists_every_violation_with_value_and_source() -> None:
    error = InvalidSpecError(
        [
            Violation(field="a.b", value="3", message="must be < 2", source="rl.toml:4"),
            Violation(field="c", message="is missing"),
        ]
    )
    assert str(error) == "2 violations: a.b: must be < 2 (got 3) [rl.toml:4]; c: is missing"
    assert str(InvalidSpecError([Violation(field="c", message="is missing")])) == "c: is missing"


def test_invalid_spec_without_a_violation_is_a_defect() -> None:
    with pytest.raises(ValueError, match="at least one"):
        InvalidSpecError([])


@pytest.mark.parametrize("cls", list(errors.error_classes()), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_errors_survive_executors(cls: type[MillraceError], through) -> None:
    error = make(cls)
    twin = through(error)
    assert type(twin) is cls
    assert twin.__dict__ == error.__dict__
    assert str(twin) == str(error)


def test_errors_and_telemetry_import_neither_grpc_nor_pydantic_nor_protobuf() -> None:
    code = (
        "import sys, millrace.errors;"
        "from millrace.telemetry import logging, settings, waits;"
        "print(sorted({'grpc', 'pydantic', 'google.protobuf', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
