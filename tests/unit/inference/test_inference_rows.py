"""The columns of running requests: adding is all or nothing."""

import numpy as np
import pytest

from millrace.inference.embedded import rows as rows_module
from millrace.inference.embedded.rows import RowTable, Running
from millrace.inference.engine import GenerateRequest, SamplingParams


def entry(name: str, *, top_k: int = 0, prompt: int = 3, limit: int = 8) -> Running:
    return Running(
        request=GenerateRequest(
            request_id=name,
            prompt_token_ids=tuple(range(prompt)),
            sampling=SamplingParams(max_tokens=4, top_k=top_k),
        ),
        seed=1,
        limit=limit,
        deliver=lambda _: None,
        refuse=lambda _: None,
    )


def test_an_entry_that_does_not_fit_a_column_leaves_the_table_as_it_was():
    table = RowTable()
    table.add([entry("a")], [9])
    with pytest.raises(OverflowError):
        table.add([entry("b"), entry("c", top_k=3_000_000_000)], [9])
    assert (table.count, len(table.running), table.find("b")) == (1, 1, None)
    assert table.add([entry("d", prompt=2)], [9]) == slice(1, 2)
    assert table.completion(1).size == 0 and table.tokens[1, :2].tolist() == [0, 1]
    table.remove([0])
    assert [e.request.request_id for e in table.running] == ["d"]


def test_running_out_of_memory_while_growing_leaves_columns_of_one_length(monkeypatch):
    table, real, calls = RowTable(), rows_module.grow_column, []

    def grown(old: np.ndarray, shape: tuple[int, ...], *, fill: int = 0) -> np.ndarray:
        calls.append(shape)
        if len(calls) == 5:
            raise MemoryError
        return real(old, shape, fill=fill)

    monkeypatch.setattr(rows_module, "grow_column", grown)
    with pytest.raises(MemoryError):
        table.add([entry("a")], [9])
    assert {len(column) for column in table.columns()} == {0}
    assert table.add([entry("a")], [9]) == slice(0, 1)
