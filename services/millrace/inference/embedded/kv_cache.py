"""The KV cache of the embedded engine: one row per running request, in one dense block per layer.

Row i of the cache is row i of the decode batch, so a decode step reads the leading rows as a view and gathers nothing.
When a request leaves, the scheduler moves the last row into the hole. The block grows by doubling, in rows and in
length, up to what the scheduler admits.
"""

import torch
from transformers.cache_utils import Cache

_ROW_STEP = 8
_LENGTH_STEP = 64


class RowCache(Cache):
    """Keys and values, per layer [rows, heads, length, head_dim], behind the interface that transformers models use.

    `begin_prefill` or `begin_decode` says where the next forward pass writes. Positions beyond a request's length hold
    old values: callers mask them.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = 0
        self._length = 0
        self._first_row = 0
        self._copies: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._row_index: torch.Tensor | None = None
        self._span = 0

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and length that are allocated."""
        return self._rows, self._length

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(block.nbytes for block in (*self._keys, *self._values))

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` requests of `length` tokens; what is held stays."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, min(2 * self._rows, rows + 64), _ROW_STEP)
        if length > self._length:
            self._length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        for blocks in (self._keys, self._values):
            for layer, old in enumerate(blocks):
                blocks[layer] = _grown(old, self._rows, self._length)

    def release(self) -> None:
        """Free the blocks."""
        self._keys.clear()
        self._values.clear()
        self._rows = self._length = 0

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of rows `sources` over rows `targets` (disjoint from them)."""
        for block in (*self._keys, *self._values):
            block[targets, :, :length] = block[sources, :, :length]

    def clear_rows(self, rows: list[int]) -> None:
        """Zero rows: a masked position contributes 0 x value, which must not be 0 x NaN."""
        for block in (*self._keys, *self._values):
            block[rows] = 0

    def begin_prefill(self, first_row: int, copies: torch.Tensor | None = None) -> None:
        """The next pass computes whole prompts, from position 0, of the rows from `first_row` on.

        `copies` int64 [rows]: which prompt of the pass each row has, where some share one; None if each has its own.
        """
        self._first_row = first_row
        self._copies = copies
        self._positions = None

    def begin_decode(self, positions: torch.Tensor, span: int) -> None:
        """The next pass adds one token per row, at `positions` int64 [B], and attends to positions below `span`."""
        self._positions = positions
        self._row_index = torch.arange(len(positions))
        self._span = span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: stores [B, heads, T, head_dim] and returns what to attend to."""
        if layer_idx == len(self._keys):
            for blocks, new in ((self._keys, key_states), (self._values, value_states)):
                _, heads, _, head_dim = new.shape
                blocks.append(torch.zeros(self._rows, heads, self._length, head_dim, dtype=new.dtype))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._positions is None:
            count, _, length, _ = key_states.shape
            copies = self._copies
            rows = slice(self._first_row, self._first_row + (count if copies is None else len(copies)))
            keys[rows, :, :length] = key_states if copies is None else key_states[copies]
            values[rows, :, :length] = value_states if copies is None else value_states[copies]
            return key_states, value_states
        index = self._row_index
        keys[index, :, self._positions] = key_states[:, :, 0]
        values[index, :, self._positions] = value_states[:, :, 0]
        count = len(self._positions)
        return keys[:count, :, : self._span], values[:count, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the next pass's first one; models ask only where no positions are given, and we give them."""
        return 0 if self._positions is None else self._span - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next pass's first token, for the mask of a prefill (a decode has its own)."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys and offset of the first one, for the mask of a prefill."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _grown(old: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """A zeroed block of the new size with the old one in its corner."""
    new = torch.zeros(rows, old.shape[1], length, old.shape[3], dtype=old.dtype)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
