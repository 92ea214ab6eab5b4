"""The fuzz lane: damages the corpus of every decoder for a while, each in a process of its own.

    python -m millrace_testing.fuzz.run [--seconds 60] [--target NAME] [--seed N]

Prints inputs, seconds, the slowest input and the memory that each target's process grew by. Ends with exit code 1 if a
decoder raised what it must not, gave back something else after encoding and decoding it again, took too long for one
input, or grew by more than 256 MiB; the input is in outputs/fuzz then. Targets that are `known` to fail do not count.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace_testing.fuzz import mutate
from millrace_testing.fuzz.targets import TARGETS, Target
from millrace_testing.repository import REPOSITORY

FOUND = REPOSITORY / "outputs" / "fuzz"
MAX_GROWTH = 256 << 20
HANG_S = 20
"""After which one input ends its process."""
MAX_FINDINGS = 5


@dataclass(slots=True)
class Report:
    """The results of fuzzing one target."""

    name: str
    inputs: int = 0
    decoded: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    growth: int = 0
    findings: list[str] | None = None


def check(target: Target, decode, encode, data: bytes) -> bool:
    """Feed one input to the target and return whether it decoded; raise what the decoder must not raise."""
    began = time.process_time()
    try:
        value = decode(data)
        if encode is not None and value is not None:
            again = decode(encode(value))
            assert again == value or _is_nan(again, value), "it decodes to something else after it was encoded again"
    except target.errors as error:
        assert str(error).strip(), "an error without a message"
        return False
    finally:
        took = time.process_time() - began
    assert took < target.max_s, f"one input took {took:.1f} s of CPU"
    return True


def _is_nan(one: object, other: object) -> bool:
    """Return whether two values differ only in NaN, which is unequal to itself: their texts are equal."""
    return str(one) == str(other)


def fuzz(target: Target, seconds: float, seed: int) -> Report:
    """Run one target in this process and return what was found."""
    report, findings = Report(target.name), {}
    decode, encode = target.load()
    damage, seeds = target.mutate(), target.seeds()
    for data in seeds:
        is_decoded = check(target, decode, encode, data)
        assert is_decoded or not target.answers_all, f"{target.name}: a seed of the corpus does not decode"
    rng = random.Random(seed)
    gc.collect()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        data = mutate.spliced(rng, seeds, damage)
        signal.alarm(HANG_S)
        start = time.process_time()
        try:
            report.decoded += check(target, decode, encode, data)
        except Exception as error:  # noqa: BLE001 - what no decoder may raise is what is looked for
            kind = f"{type(error).__name__} at {_place(error)}"
            if kind not in findings and len(findings) < MAX_FINDINGS:
                findings[kind] = f"{kind}: {str(error)[:160]} [{_keep(target.name, data)}]"
        signal.alarm(0)
        report.slowest_s = max(report.slowest_s, time.process_time() - start)
        report.inputs += 1
    report.seconds = time.monotonic() - began
    report.growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    if report.growth > MAX_GROWTH:
        findings["memory"] = f"its process grew by {report.growth >> 20} MiB"
    report.findings = list(findings.values())
    return report


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "millrace" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def _keep(name: str, data: bytes) -> str:
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return str(path.relative_to(REPOSITORY))


def in_child(target: Target, seconds: float, seed: int) -> Report:
    """Fuzz a target in a forked process, and return the report. A crash of the process is a finding, too."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        code = 1
        try:
            with os.fdopen(write, "w") as out:
                json.dump(asdict(fuzz(target, seconds, seed)), out)
            code = 0
        except BaseException:  # noqa: BLE001 - the edge of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Report(**json.loads(text))
    code = os.waitstatus_to_exitcode(status)
    why = f"one input took more than {HANG_S} s" if code == -signal.SIGALRM else f"its process ended with {code}"
    return Report(target.name, findings=[why])


def main() -> int:
    """Fuzz the targets that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    chosen = [target for target in TARGETS if not args.target or target.name in args.target]
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {len(chosen)} targets, {args.seconds:g} s", flush=True)
    print(f"{'target':20} {'inputs':>8} {'decoded':>8} {'seconds':>8} {'slowest':>10} {'grew by':>9}", flush=True)
    failed, inputs, growth = 0, 0, 0
    shares = sum(target.weight for target in chosen)
    for target in chosen:
        report = in_child(target, args.seconds * target.weight / shares, seed)
        inputs, growth = inputs + report.inputs, max(growth, report.growth)
        print(
            f"{report.name:20} {report.inputs:8} {report.decoded:8} {report.seconds:8.1f} "
            f"{report.slowest_s * 1000:7.1f} ms {report.growth / (1 << 20):5.1f} MiB",
            flush=True,
        )
        for finding in report.findings or []:
            print(f"    {'known' if target.known else 'FOUND'}: {finding}", flush=True)
        failed += bool(report.findings) and not target.known
    print(f"{inputs} inputs, memory grew by {growth / (1 << 20):.1f} MiB at most, {failed} targets failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
