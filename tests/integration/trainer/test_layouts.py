"""Every layout of ranks gives what one process gives: losses, gradient norms, log-probs, and the policy afterwards."""

from pathlib import Path

import pytest

from millrace_testing.trainer.equality import MODELS, compare, facts_of, make_model, table


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_equals_one_process_and_goes_on_in_another(name: str, tmp_path: Path) -> None:
    """The checkpoint of each layout is resumed by one process, and that of one process by each layout."""
    rows = list(compare(tmp_path / "jobs", {name: make_model(name, tmp_path)}))
    print(table(rows))
    bad = [row for row in rows if not (row.is_within() and row.repeats)]
    assert not bad, table(bad)
    norms = facts_of(tmp_path / "jobs" / f"{name}-adamw-one")["grad_norm"]
    assert max(norms) > 0.5, "gradients are clipped"
