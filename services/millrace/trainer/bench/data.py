"""Batches of fake samples, a pure function of seed and step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.config.sections.bench import FakeDataConfig
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, Minibatch, build_micro_batch
from millrace.trainer.learning.fake_samples import fake_sample
from millrace.trainer.learning.plan import in_order, plan_micro_batches
from millrace.trainer.log.batches import Batch

SHORTEST = 0.1
"""Of `seq_len`: the shortest sample of variable lengths."""


def fake_samples(
    data: FakeDataConfig, *, step: int, seed: int, vocabulary: int, is_sft: bool = False
) -> list[TrainSample]:
    """The samples of a step: random tokens in `data.seq_len` tokens each, or in 10 to 100 % of them."""
    random = np.random.default_rng((seed, step))
    shortest = max(int(SHORTEST * data.seq_len), 2)
    samples = []
    for ordinal in range(data.batch_size):
        length = data.seq_len if data.type == "fixed" else int(random.integers(shortest, data.seq_len + 1))
        sample = fake_sample(length, vocabulary=vocabulary, of_rl=not is_sft)
        token_ids = random.integers(0, vocabulary, length).astype(np.int32)
        # About the log-probs of a model that knows nothing, so that no loss masks the tokens as off-policy.
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        samples.append(replace(sample, token_ids=token_ids, inference_logprobs=logprobs, ordinal=ordinal))
    return samples


def fake_batch(samples: Sequence[TrainSample], *, step: int, layout: BatchLayout, gang: Gang) -> Batch:
    """The batch of these samples as this rank has it: planned, padded or packed, and on its device, like a real one."""
    lengths = [min(len(sample.token_ids), layout.seq_len) for sample in samples]
    plans = plan_micro_batches(
        lengths,
        max_tokens=layout.micro_batch_tokens,
        world_size=gang.layout.data_size,
        packing=layout.packing,
    )
    micro_batches, places = [], []
    for rows in plans[gang.data_rank]:
        flat = [index for row in rows for index in row]
        mine = [samples[index] for index in flat]
        micro_batches.append(build_micro_batch(mine, rows=in_order(rows), seq_len=layout.seq_len, device=gang.device))
        places.append(flat)
    entries = [
        batch_pb2.SampleEntry(ordinal=sample.ordinal, length=length)
        for sample, length in zip(samples, lengths, strict=True)
    ]
    header = batch_pb2.BatchHeader(step=step, envs=[""], samples=entries, num_tokens=sum(lengths))
    minibatch = Minibatch(micro_batches=micro_batches, samples=places)
    return Batch(header=header, chain_hash=b"", minibatches=[minibatch], wait_s=0.0, load_s=0.0)
