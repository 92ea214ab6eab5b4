"""What each rank of a gang holds of a model that it has read its shares of, on a machine that is none: all but the last
are forked one after the other, and nothing that they send arrives. It reads a job, as JSON, from its argument.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.device_digest import device_digest
from millrace.models.loading import empty_model, fill_model
from millrace.trainer.bench import PeakMemory
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.memory import Sharding
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.published import published_share, published_tensors

_CPU = torch.device("cpu")


def loaded(directory: Path, layout: RankLayout, rank: int) -> dict[str, Any]:
    """Return the digest of each tensor that a rank publishes (hex), the bytes it holds, and the additional bytes while
    loading.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.data_size)
    gang = Gang(rank=rank, world_size=layout.data_size)
    gang.lay_out(layout)
    memory = PeakMemory(_CPU)
    before = memory.peak
    model = gang.shard(empty_model(directory), Sharding(compute_dtype=torch.float32))
    fill_model(model, directory, device=_CPU)
    digests = {}
    for each in published_tensors(model, version=0, dtype=torch.float32):
        if (share := published_share(each.tensor, rank=rank, is_first_part=True)) is not None:
            flat, start = share[0].reshape(-1), share[1]
            for saved, begin, end in each.within(start, flat.numel()):
                digests[saved.name] = f"{device_digest(flat[begin - start : end - start], start=begin - saved.start):x}"
    shards: Any = model.parameters()  # all are cut
    held = sum(each.to_local().nbytes for each in shards)
    return {"digests": digests, "held": held, "taken": memory.peak - before}


def main(job: dict[str, Any]) -> None:
    """Print a line of JSON for each rank of the job."""
    torch.set_num_threads(1)
    directory, layout = Path(job["directory"]), RankLayout(**job["layout"])
    *others, last = job["ranks"]
    for rank in others:
        if (child := os.fork()) == 0:
            print(json.dumps(loaded(directory, layout, rank)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"rank {rank} failed")
    # In this process, because a fork that touches the pages of its parent seems to take them.
    empty_model(directory)  # imports the model's code, which is no rank's own
    print(json.dumps(loaded(directory, layout, last)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
