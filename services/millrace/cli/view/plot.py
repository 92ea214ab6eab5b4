"""Draw the plots of a run and of an evaluation."""

from pathlib import Path
from typing import Any

from millrace.cli.view.progress import Progress


def write_plot(progress: Progress, path: Path) -> bool:
    """Draw reward, held-out reward, staleness and step time over the steps, as a PNG.

    Return False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    # Agg draws into files, and needs no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=[2, 1])
    try:
        numbers = [point.number for point in progress.steps]
        top.plot(numbers, [point.reward for point in progress.steps], label="training batch", linewidth=1.2)
        for env in dict.fromkeys(point.env for point in progress.evals):
            points = sorted((p for p in progress.evals if p.env == env), key=lambda p: p.version)
            label = f"held-out {env}"
            top.plot([p.version for p in points], [p.reward for p in points], "o--", label=label, linewidth=1.2)
        top.set_ylabel("mean reward")
        top.set_title(progress.name.removeprefix("runs/"))
        if progress.steps or progress.evals:
            top.legend(loc="best")
        top.grid(alpha=0.3)
        bottom.plot(numbers, [point.staleness_mean for point in progress.steps], label="staleness", linewidth=1.2)
        bottom.set_ylabel("mean staleness (steps)")
        bottom.set_xlabel("step (policy version)")
        bottom.grid(alpha=0.3)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        seconds = bottom.twinx()
        seconds.plot(numbers, [p.step_s for p in progress.steps], color="tab:gray", label="step time", linewidth=0.8)
        seconds.plot(numbers, [p.wait_s for p in progress.steps], color="tab:red", label="trainer waits", linewidth=0.8)
        seconds.set_ylabel("seconds per step")
        seconds.set_ylim(bottom=0)
        lines = [*bottom.get_lines(), *seconds.get_lines()]
        bottom.legend(lines, [str(line.get_label()) for line in lines], loc="best", fontsize="small")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        # pyplot keeps every figure until it is closed.
        pyplot.close(figure)
    return True


def write_eval_plot(data: dict[str, Any], path: Path) -> bool:
    """Draw the mean reward of each environment over the steps with its standard error, as a PNG.

    `data` are the results of several policies. Return False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    try:
        for env in dict.fromkeys(name for policy in data["policies"] for name in policy["envs"]):
            points = [(p["step"] or 0, p["envs"][env]) for p in data["policies"] if env in p["envs"]]
            rewards, errors = [e["reward_mean"] for _, e in points], [e["reward_sem"] or 0.0 for _, e in points]
            axes.errorbar([step for step, _ in points], rewards, yerr=errors, fmt="o-", capsize=3, label=env)
        axes.set_xlabel("step (0: the base model)")
        axes.set_ylabel("mean reward ± standard error")
        axes.set_title(data["name"])
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
    return True
