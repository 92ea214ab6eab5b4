"""As a program, in an interpreter with `verifiers` 0.4: tasks that `select` chooses beside those of the library.

Prints how many selections, drawn by a seed, chose the same tasks in the same order; fails at the first that did not.
"""

import random
from typing import Any


def main() -> None:
    """Compare selections of a taskset of twenty."""
    import verifiers.v1 as vf
    from rev_text_v1 import RevConfig, RevTaskset

    from millrace.config.sections.environments import SelectConfig, selection_json
    from millrace.env_server.adapters.selection import selected_tables, tasks_of
    from millrace.errors import InvalidSpecError

    rng = random.Random(7)
    taskset = RevTaskset(RevConfig(id="rev-text-v1", num_examples=20))
    keys = [task.key for task in taskset]
    num_same = 0
    for _ in range(300):
        said = _drawn(rng, keys)
        theirs = [task.data.idx for task in taskset.select(vf.SelectConfig.model_validate(said))]
        text = selection_json(train=SelectConfig.model_validate(said))
        try:
            table, _ = selected_tables(text, train=tasks_of(taskset, 20), held_out=None, is_mixed=False)
            ours = [table.row(at).data.idx for at in range(len(table))]
        except InvalidSpecError:
            ours = []  # a run without tasks is refused
        assert ours == theirs, (said, ours, theirs)
        num_same += bool(ours)
    print(num_same)


def _drawn(rng: random.Random, keys: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = {"shuffle": rng.random() < 0.5, "seed": rng.randrange(5), "skip": rng.randrange(4)}
    for side in ("include", "exclude"):
        if rng.random() < 0.6:
            said[side] = {"idx": rng.choice(["0:10", "3,5:9", "::2", "5:", "1:19:3", [1, 4, "7:12"], ":4"])}
        if rng.random() < 0.3:
            said.setdefault(side, {})["keys"] = rng.sample(keys, 3)
    if rng.random() < 0.5:
        said["limit"] = rng.randrange(1, 9)
    return said


if __name__ == "__main__":
    main()
