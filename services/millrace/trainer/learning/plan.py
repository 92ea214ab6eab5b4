"""Which samples go through the model at once, and at which rank: a pure function of lengths, layout and costs.

A micro-batch is rows; a row is one sample, padded to the longest row, or several samples one after the other. Whether
a minibatch is padded or packed is decided by what both would cost (`[trainer.pack]`), so that every rank, a replay and
a resumed run decide alike from the header's sample table. Costs that depend on the model and the device are recorded in
every checkpoint (`how_rows_are_made`), so that a resumed run notices another plan.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

Rows = list[list[int]]
"""A micro-batch: the indices of the samples of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows are packed, and the costs that decide it, in operations of a matrix product.

    `per_token` and `per_square` are those of `FlopCount`. An operation of attention costs `causal_cost` in a row of one
    sample, and `masked_cost` if a dense mask separates samples. With a kernel for rows of varying lengths (`is_varlen`)
    only pairs of tokens within a sample cost anything. `is_always` packs without comparing costs. With `is_alone`
    nothing is packed, and a micro-batch is one sample.
    """

    per_token: float
    per_square: float
    causal_cost: float
    masked_cost: float
    is_always: bool = False
    is_varlen: bool = False
    is_alone: bool = False

    def cost(self, rows: Rows, lengths: Sequence[int]) -> float:
        """Return the cost of a micro-batch, in operations of a matrix product.

        `lengths` has the tokens of each sample.
        """
        if not rows:
            return 0.0
        width = max(sum(lengths[index] for index in row) for row in rows)
        is_packed = any(len(row) > 1 for row in rows)
        # The kernel for varying lengths computes pairs of tokens of one sample only, a dense mask all pairs of a row.
        if is_packed and self.is_varlen:
            pairs = self.causal_cost * sum(lengths[index] ** 2 for row in rows for index in row)
        else:
            pairs = (self.masked_cost if is_packed else self.causal_cost) * len(rows) * width**2
        return self.per_token * len(rows) * width + self.per_square * pairs

    def cost_of_ranks(self, plan: Sequence[Sequence[Rows]], lengths: Sequence[int]) -> float:
        """Return the cost of a plan for all ranks: the sum, over micro-batches, of the cost at the slowest rank.

        `plan` has the micro-batches of each rank, and `lengths` the tokens of each sample.
        """
        return sum(max(self.cost(rows, lengths) for rows in abreast) for abreast in zip(*plan, strict=True))


ALONE = Packing(per_token=0.0, per_square=0.0, causal_cost=0.0, masked_cost=0.0, is_alone=True)
"""The packing for a model that mixes the samples of a micro-batch."""


def how_rows_are_made(packing: Packing | None) -> str:
    """Describe, as text to compare, everything that plans depend on besides header, config and number of ranks.

    None is a packing of one sample in each row.
    """
    if packing is None:
        return "one sample each"
    if packing.is_alone:
        return "one sample in each micro-batch"
    facts = ", ".join(f"{name} {value}" for name, value in asdict(packing).items())
    return f"packed by cost: {facts}"


def plan_minibatches(ordinals: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of each minibatch's samples: groups are dealt, whole, in turn in the order of their ordinals.

    `ordinals` has each sample's group. Fewer groups than `count` make fewer minibatches, but at least one.
    """
    places = {ordinal: place for place, ordinal in enumerate(sorted(set(ordinals)))}
    minibatches: list[list[int]] = [[] for _ in range(max(min(count, len(places)), 1))]
    for index, ordinal in enumerate(ordinals):
        minibatches[places[ordinal] % len(minibatches)].append(index)
    return minibatches


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, world_size: int = 1, packing: Packing | None = None
) -> list[list[Rows]]:
    """Return each rank's micro-batches: rows times longest row are at most `max_tokens`, or one sample that is longer.

    `lengths` has the tokens of each sample. Every rank gets equally many micro-batches, because the ranks' collectives
    pair up, and about equal work; with fewer samples than ranks some micro-batches are empty. Samples of length 0 are
    left out. Rows hold several samples only with `packing`, and if that costs less or is configured.
    """
    # Ties are sorted by index: the plan is a function of the header alone, and a replay must make the same one.
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    is_alone = packing is not None and packing.is_alone
    padded = _dealt(_padded(order, lengths, 1 if is_alone else max_tokens), lengths, world_size)
    if packing is None or is_alone:
        return padded
    packed = _dealt(_packed(order, lengths, max_tokens, packing), lengths, world_size)
    is_cheaper = packing.cost_of_ranks(packed, lengths) < packing.cost_of_ranks(padded, lengths)
    return packed if packing.is_always or is_cheaper else padded


def in_order(rows: Rows) -> Rows:
    """Return the rows with their samples renumbered 0, 1, … in the order in which they occur."""
    starts = accumulate((len(row) for row in rows), initial=0)
    return [list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=False)]


def _padded(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Rows]:
    """Fill micro-batches with rows of one sample each, in `order`, and return them.

    `order` has the samples' indices from the longest to the shortest, so that little is padded.
    """
    micro_batches: list[Rows] = []
    for index in order:
        # Sorted downwards, so the first row of a micro-batch is its longest.
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0][0]] <= max_tokens:
            micro_batches[-1].append([index])
        else:
            micro_batches.append([[index]])
    return micro_batches


def _packed(order: Sequence[int], lengths: Sequence[int], max_tokens: int, packing: Packing) -> list[Rows]:
    """Fill micro-batches with rows of several samples: the longest sample left, then the longest that fits, and so on.

    `order` has the samples' indices from the longest to the shortest. With a dense mask, rows are as long as that first
    sample, because attention is quadratic in the row; with a kernel for varying lengths one row is the whole
    micro-batch.
    """
    waiting = [(-lengths[index], index) for index in order]
    micro_batches: list[Rows] = []
    while waiting:
        longest = -waiting[0][0]
        # With a dense mask attention is quadratic in the row, so rows stay as short as their longest sample allows.
        width = max(max_tokens, longest) if packing.is_varlen else longest
        rows: Rows = [[] for _ in range(max(max_tokens // width, 1))]
        free = [width] * len(rows)
        # `waiting` is sorted by falling length: this is the longest sample that fits into the roomiest row.
        # -1 is below every index, so that a sample of exactly this length is found, too.
        while (at := bisect_left(waiting, (-max(free), -1))) < len(waiting):
            negative, index = waiting.pop(at)
            row = next(place for place, room in enumerate(free) if room >= -negative)
            rows[row].append(index)
            free[row] += negative
        micro_batches.append([row for row in rows if row])
    return micro_batches


def _dealt(micro_batches: list[Rows], lengths: Sequence[int], world_size: int) -> list[list[Rows]]:
    """Deal micro-batches to ranks in turn, and return each rank's; halve the largest until all ranks have equally many.

    `lengths` has the tokens of each sample. Empty micro-batches are added if none can be halved any more. Consecutive
    micro-batches go to consecutive ranks, so that the ranks' work is nearly equal.
    """
    while len(micro_batches) % world_size:
        # Splitting costs less than an empty micro-batch, in which a rank would only take part in collectives.
        several = [at for at, rows in enumerate(micro_batches) if sum(map(len, rows)) > 1]
        if not several:
            micro_batches.append([])
            continue
        largest = max(several, key=lambda at: _size(micro_batches[at], lengths))
        micro_batches[largest : largest + 1] = _halves(micro_batches[largest])
    return [micro_batches[rank::world_size] for rank in range(world_size)]


def _size(rows: Rows, lengths: Sequence[int]) -> int:
    """Return how many tokens a micro-batch has with its padding; `lengths` has the tokens of each sample."""
    return len(rows) * max(sum(lengths[index] for index in row) for row in rows)


def _halves(rows: Rows) -> list[Rows]:
    """Return both halves of a micro-batch, cut between its rows, or the samples of its only row dealt to two rows."""
    if len(rows) > 1:
        half = -(-len(rows) // 2)
        return [rows[:half], rows[half:]]
    return [[rows[0][::2]], [rows[0][1::2]]]
