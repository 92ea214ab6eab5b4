"""Weights as deltas: size and speed of the codec beside three references, and publish to staged beside full copies.

    python benchmarks/weight_sync.py [--quick] [--repeats 7] [--only codec|latency] [--engine NAME]

Codec: two versions of a bf16 policy, synthetic at eight densities (share of changed elements) and from real AdamW steps
of a transformer of 29 M parameters (fp32 master, trained past Adam's start-up). Speeds are GB/s of full bf16 bytes per
processor second of one thread; repetitions of all codecs are interleaved, figures are medians. `delta` includes the
digest of the result, computed from the base's digest and the change, and when applying the proof of it; `delta without
digests` is the same codec with the digests taken out, which is what the references, that prove nothing, compare to.
Publisher and host copy know the base's digest from the version before; the report says what a whole digest costs.

Latency: a bf16 model of 117 M parameters is published by the trainer's committer and staged by a replica's host copy
through a local object store, once as deltas (with the skip deltas that are due), once as full copies; then the engine
is updated. With `--engine vllm` a real vLLM (`scripts/setup_vllm.sh`) is updated while a client streams from it.
The full run takes about five minutes on two cores, --quick half a minute, vLLM four.
"""

import argparse
import statistics
import time

import numpy as np
from report import end_like_interrupt, progress, table
from weight_sync_codecs import FULL, INDEX, OURS, OURS_BARE, XOR, Codec, kinds, measure, speed
from weight_sync_data import AdamSteps, Versions, synthetic
from weight_sync_latency import ENGINES, latency_report
from weight_sync_vllm import vllm_report

from millrace.policies.digest import bits_digest

DENSITIES = (0.002, 0.005, 0.009, 0.02, 0.05, 0.1, 0.2, 0.4)
RATES = (1e-6, 3e-6, 1e-5, 1e-4)
GOAL_BYTES_PER_CHANGE = 1.7
GOAL_ENCODE_GB_S = 1.0


def codec_report(*, quick: bool, repeats: int) -> str:
    """Both tables of the codec, the digest's speed and the goals, as Markdown."""
    elements = 1 << 20 if quick else 1 << 24
    measured: list[tuple[Versions, list[Codec], str]] = []

    def add(versions: Versions) -> None:
        progress(f"codec: {versions.name}")
        measured.append((versions, measure(versions, repeats=repeats), kinds(versions)))

    for density in DENSITIES:
        add(synthetic(density, elements=elements))
    steps = AdamSteps(width=128, layers=2, warm_up_steps=5) if quick else AdamSteps(width=512, layers=9)
    for rate in RATES:
        add(steps.versions(rate))
    sizes, speeds = [], []
    for versions, codecs, kind in measured:
        sizes.append(_size_row(versions, {codec.name: codec for codec in codecs}, kind))
        speeds.append([versions.name, *(_speeds(versions, codec) for codec in codecs)])
    size_columns = [name for codec in (OURS, XOR, INDEX, FULL) for name in (codec, "ratio")]
    return "\n\n".join(
        [
            f"## Codec\n\nSynthetic: {elements:,} elements in one piece; AdamW: {steps.num_parameters:,} parameters, a "
            f"piece for each tensor. Medians of {repeats}.",
            "### Size: bytes per changed element, and how much smaller than a full copy",
            table(["versions", "changed", "by 1 ulp", "frames", *size_columns], sizes),
            "### Speed: GB/s of full bf16 bytes per core, encode / decode and apply",
            table(["versions", *(codec.name for codec in measured[0][1])], speeds),
            _digest_line(elements, repeats),
            _goals(measured),
        ]
    )


def _size_row(versions: Versions, codecs: dict[str, Codec], kind: str) -> list[str]:
    changed = versions.num_changed
    full = codecs[FULL].size_bytes
    row = [
        versions.name,
        f"{100 * changed / versions.num_elements:.2f} %",
        f"{100 * versions.single_share:.0f} %",
        kind,
    ]
    for name in (OURS, XOR, INDEX, FULL):
        size = codecs[name].size_bytes
        row += [f"{size / max(1, changed):.2f}", f"{full / size:.1f}x"]
    return row


def _speeds(versions: Versions, codec: Codec) -> str:
    encode, apply = (speed(versions, seconds) for seconds in (codec.encode_s, codec.apply_s))
    return f"{encode:.2f} / {apply:6.2f}"


def _digest_line(elements: int, repeats: int) -> str:
    bits = np.random.default_rng(0).integers(0, 2**16, elements).astype(np.uint16)
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        bits_digest(bits)
        seconds.append(time.thread_time() - began)
    return f"Digest of a whole bf16 tensor: {2 * elements / statistics.median(seconds) / 1e9:.2f} GB/s."


def _goals(measured: list[tuple[Versions, list[Codec], str]]) -> str:
    versions, codecs, _ = next(entry for entry in measured if entry[0].name == "synthetic 0.9 %")
    by_name = {codec.name: codec for codec in codecs}
    size = by_name[OURS].size_bytes / versions.num_changed
    fast, bare = (speed(versions, by_name[name].encode_s) for name in (OURS, OURS_BARE))
    return (
        f"Goals at 0.9 %: {size:.2f} B per changed element (at most {GOAL_BYTES_PER_CHANGE}: "
        f"{'met' if size <= GOAL_BYTES_PER_CHANGE else 'MISSED'}); encode {fast:.2f} GB/s with the digest, {bare:.2f} "
        f"without (at least {GOAL_ENCODE_GB_S}: {'met' if fast >= GOAL_ENCODE_GB_S else 'MISSED'} with it)."
    )


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the elements, two repetitions")
    parser.add_argument("--repeats", type=int, default=None, help="default 7, 2 with --quick")
    parser.add_argument(
        "--versions", type=int, default=None, help="published behind the first: default 9, 3 with --quick"
    )
    parser.add_argument(
        "--engine", choices=(*sorted(ENGINES), "vllm"), default="embedded", help="what serves, default embedded"
    )
    parser.add_argument("--only", choices=("codec", "latency"), default=None)
    options = parser.parse_args()
    repeats = options.repeats or (2 if options.quick else 7)
    versions = options.versions or (3 if options.quick else 9)
    reports: list[str] = []
    if options.only != "latency":
        reports.append(codec_report(quick=options.quick, repeats=repeats))
    if options.only != "codec":
        if options.engine == "vllm":
            reports.append(vllm_report(quick=options.quick, versions=versions))
        else:
            reports.append(latency_report(quick=options.quick, versions=versions, engine=options.engine))
    print("\n\n".join(reports))


if __name__ == "__main__":
    main()
