"""Encode and decode speed and size of batches and rollouts, beside the same data as msgpack lists.

    python benchmarks/batch_encoding.py [--quick] [--repeats 7]

Two batches of random samples: `large`, 1024 samples of about 2 M tokens in all, and `small`, 256 samples of the demo's
length. Formats:

* `batch`: our wire format, `pack_batch` / `decode_header` + `unpack_batch`: columns as bytes in chunks, with sha256 of
  every chunk and all checks of both directions.
* `rollouts`: our rollout messages one by one, `encode_rollout` / `decode_rollout`. They have no advantages.
* `lists, same columns`: msgpack of positional lists with exactly the columns of the first row, floats as float64.
  Beside `rollouts` it is one message per rollout, too, but carries nothing of a rollout's other fields.
* `lists, prime-rl fields`: the positional lists that prime-rl sends to its trainer, one micro-batch per sample:
  input_ids, loss_mask, advantages, inference_logprobs, position_ids, sequence_lengths, temperatures, env_names (one
  string per token), seq_lens.

Each side begins with what it holds natively (numpy columns, Python lists; making those lists is not timed) and ends
with numpy columns, which is what a trainer needs. The list forms have no hash and check nothing. Repetitions of all
formats are interleaved; figures are medians. MB/s counts the columns as they lie in memory (13 bytes per token of a
batch, 9 of a rollout), not the encoded size, so that a format gains nothing by being larger.
The full run takes about half a minute and 2 GiB of memory on one core, --quick (an eighth of the samples) two seconds.
"""

import argparse
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from report import progress, table

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header, pack_batch, unpack_batch
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, TrainSample
from millrace.rollouts.wire import decode_rollout, encode_rollout

ENV = "reverse-text"
VOCABULARY_SIZE = 151_936  # of Qwen3: a typical one, ids of three bytes
COLUMNS = (np.int32, np.uint8, np.float32, np.float32)  # token_ids, loss_mask, inference_logprobs, advantages
BATCH_BYTES_PER_TOKEN = 13
ROLLOUT_BYTES_PER_TOKEN = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One format: both functions on a whole batch. `encode` returns all bytes of it, in parts."""

    name: str
    encode: Callable[[], list[bytes]]
    decode: Callable[[list[bytes]], list[Any]]


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds of each repetition."""

    encoded_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def make_samples(lengths: Sequence[int], rng: np.random.Generator) -> list[TrainSample]:
    """Samples whose first fifth is the prompt; groups of 16 share an ordinal, each sample has one advantage."""
    samples = []
    for index, length in enumerate(map(int, lengths)):
        mask = np.ones(length, np.uint8)
        mask[: max(1, length // 5)] = 0
        logprobs = np.where(mask == 1, -rng.exponential(0.5, length), 0).astype(np.float32)
        samples.append(
            TrainSample(
                token_ids=rng.integers(0, VOCABULARY_SIZE, length, dtype=np.int32),
                loss_mask=mask,
                inference_logprobs=logprobs,
                advantages=mask * np.float32(rng.normal()),
                ordinal=index // 16,
                member=index % 16,
                attempt=0,
                env=ENV,
                reward=float(rng.random()),
                temperature=1.0,
                min_version=6,
                max_version=7,
                lineage=0,
            )
        )
    return samples


def make_rollouts(samples: Sequence[TrainSample]) -> list[Rollout]:
    """A rollout around each sample; its policy changed in the middle."""
    rollouts = []
    for sample in samples:
        middle = sample.num_tokens // 2
        spans = (
            PolicySpan(lineage=0, version=6, start=0, end=middle),
            PolicySpan(lineage=0, version=7, start=middle, end=sample.num_tokens),
        )
        columns = Sample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            inference_logprobs=sample.inference_logprobs,
            policy_spans=spans,
        )
        rollouts.append(
            Rollout(
                run_uid="0" * 28,
                purpose=Purpose.TRAIN,
                ordinal=sample.ordinal,
                member=sample.member,
                attempt=sample.attempt,
                group_size=16,
                env=sample.env,
                task_index=sample.ordinal,
                task_id=str(sample.ordinal),
                status=RolloutStatus.OK,
                samples=(columns,),
                reward=sample.reward,
                num_turns=1,
            )
        )
    return rollouts


def batch_codec(samples: Sequence[TrainSample]) -> Codec:
    """Our batch: the header's bytes, then the chunks."""

    def encode() -> list[bytes]:
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_TRAIN, run_uid="0" * 28, step=7)
        chunks = pack_batch(header, samples)
        return [header.SerializeToString(deterministic=True), *chunks]

    def decode(parts: list[bytes]) -> list[Any]:
        return unpack_batch(decode_header(parts[0]), dict(enumerate(parts[1:])))

    return Codec(name="batch", encode=encode, decode=decode)


def rollout_codec(rollouts: Sequence[Rollout]) -> Codec:
    """Our rollouts, one message each."""
    return Codec(
        name="rollouts",
        encode=lambda: [encode_rollout(rollout) for rollout in rollouts],
        decode=lambda parts: [decode_rollout(part) for part in parts],
    )


def columns_of(sample: TrainSample, count: int) -> list[list[Any]]:
    """The first `count` columns of a batch as lists, the mask as booleans."""
    columns = [
        sample.token_ids.tolist(),
        sample.loss_mask.astype(bool).tolist(),
        sample.inference_logprobs.tolist(),
        sample.advantages.tolist(),
    ]
    return columns[:count]


def prime_rl_fields(sample: TrainSample) -> list[Any]:
    """One micro-batch of one sample in prime-rl's order of fields."""
    tokens, mask, logprobs, advantages = columns_of(sample, 4)
    length = sample.num_tokens
    temperatures = [sample.temperature] * length
    return [
        tokens, mask, advantages, logprobs, list(range(length)), [length], temperatures, [sample.env] * length, [length]
    ]  # fmt: skip


def list_codec(name: str, messages: list[list[list[Any]]], dtypes: dict[int, type]) -> Codec | None:
    """Msgpack of positional lists, each message a list of samples.

    `dtypes` says which positions become arrays of what. None without a library.
    """
    functions = msgpack_functions()
    if functions is None:
        return None
    pack, unpack = functions

    def decode(parts: list[bytes]) -> list[Any]:
        rows = (row for part in parts for row in unpack(part))
        return [[np.array(row[at], dtype) for at, dtype in dtypes.items()] for row in rows]

    return Codec(name=name, encode=lambda: [pack(message) for message in messages], decode=decode)


def msgpack_functions() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | None:
    """Encoder and decoder of the msgpack library that is installed: msgspec (prime-rl's own) before msgpack."""
    match msgpack_library():
        case "msgspec":
            module = importlib.import_module("msgspec.msgpack")
            return module.Encoder().encode, module.Decoder().decode
        case "msgpack":
            module = importlib.import_module("msgpack")
            return module.packb, module.unpackb
    return None


def msgpack_library() -> str | None:
    """The name of what can be imported; neither is a dependency of ours."""
    return next((name for name in ("msgspec", "msgpack") if importlib.util.find_spec(name)), None)


def run(codecs: Sequence[Codec], num_samples: int, repeats: int) -> dict[str, Timing]:
    """Interleaved repetitions after one warm-up of each; every repetition must return every sample."""
    timings = {codec.name: Timing() for codec in codecs}
    for repeat in range(repeats + 1):
        for codec in codecs:
            gc.collect()
            began = time.perf_counter()
            parts = codec.encode()
            encoded = time.perf_counter()
            count = len(codec.decode(parts))
            decoded = time.perf_counter()
            if count != num_samples:
                raise RuntimeError(f"{codec.name} returned {count} of {num_samples} samples")
            if repeat > 0:
                timing = timings[codec.name]
                timing.encoded_bytes = sum(map(len, parts))
                timing.encode_s.append(encoded - began)
                timing.decode_s.append(decoded - encoded)
    return timings


def rows_of(timings: dict[str, Timing], num_tokens: int, bytes_per_token: int) -> list[list[object]]:
    """Medians, and how many times larger or slower than the first format each one is."""
    ours = next(iter(timings.values()))
    rows: list[list[object]] = []
    for name, timing in timings.items():
        encode, decode = statistics.median(timing.encode_s), statistics.median(timing.decode_s)
        megabytes = num_tokens * bytes_per_token / 1e6
        rows.append(
            [
                name,
                f"{timing.encoded_bytes / num_tokens:.2f}",
                f"{timing.encoded_bytes / ours.encoded_bytes:.2f}x",
                f"{encode * 1e3:.1f}",
                f"{megabytes / encode:.0f}",
                f"{encode / statistics.median(ours.encode_s):.2f}x",
                f"{decode * 1e3:.1f}",
                f"{megabytes / decode:.0f}",
                f"{decode / statistics.median(ours.decode_s):.2f}x",
            ]
        )
    return rows


HEADER = ["format", "B/token", "size", "encode ms", "MB/s", "time", "decode ms", "MB/s", "time"]


def measure_batch(name: str, lengths: Sequence[int], repeats: int) -> str:
    """Both tables of one batch as Markdown."""
    samples = make_samples(lengths, np.random.default_rng(0))
    num_tokens = sum(sample.num_tokens for sample in samples)
    tables = []
    for ours, bytes_per_token, references in (
        (batch_codec(samples), BATCH_BYTES_PER_TOKEN, batch_references(samples)),
        (rollout_codec(make_rollouts(samples)), ROLLOUT_BYTES_PER_TOKEN, rollout_references(samples)),
    ):
        progress(f"{name}: {ours.name}")
        timings = run([ours, *(codec for codec in references if codec is not None)], len(samples), repeats)
        tables.append(table(HEADER, rows_of(timings, num_tokens, bytes_per_token)))
    title = f"### {name}: {len(samples)} samples, {num_tokens:,} tokens, median of {repeats}"
    return "\n\n".join([title, *tables])


def batch_references(samples: Sequence[TrainSample]) -> list[Codec | None]:
    plain = [columns_of(sample, 4) for sample in samples]
    fields = [prime_rl_fields(sample) for sample in samples]
    field_types = {0: np.int64, 1: np.bool_, 2: np.float32, 3: np.float32, 4: np.int64, 6: np.float32}
    return [
        list_codec("lists, same columns", [plain], dict(enumerate(COLUMNS))),
        list_codec("lists, prime-rl fields", [fields], field_types),
    ]


def rollout_references(samples: Sequence[TrainSample]) -> list[Codec | None]:
    each = [[columns_of(sample, 3)] for sample in samples]
    return [list_codec("lists, same columns", each, dict(enumerate(COLUMNS[:3])))]


def measure(*, quick: bool, repeats: int) -> str:
    """The report as Markdown."""
    rng = np.random.default_rng(1)
    share = 8 if quick else 1
    # Log-normal around 1.7 k tokens: most samples short, a long tail; the mean is near 2 k.
    large = np.clip(rng.lognormal(np.log(1700), 0.6, 1024 // share), 64, 16_384).astype(int).tolist()
    small = rng.integers(16, 40, 256 // share).tolist()
    library = msgpack_library()
    reference = f"Lists by {library}." if library else "The lists are skipped: `pip install msgspec` brings them."
    parts = [f"## Batch and rollout encoding\n\n{reference} Size and time are relative to the first row of each table."]
    parts += [measure_batch(name, lengths, repeats) for name, lengths in (("large", large), ("small", small))]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples, two repetitions")
    parser.add_argument("--repeats", type=int, default=None, help="default 7, 2 with --quick")
    options = parser.parse_args()
    print(measure(quick=options.quick, repeats=options.repeats or (2 if options.quick else 7)))


if __name__ == "__main__":
    main()
