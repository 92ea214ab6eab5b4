"""What grows with the fleet, with a run's length and with the number of runs: each law as a subcommand.

    python benchmarks/scale.py workers 250 500 1000
    python benchmarks/scale.py --help

Each subcommand is a module `scale_*.py` with `add_arguments(parser)` and `report(options)`, which returns Markdown.
Figures are CPU seconds and counts of real processes under a load that speaks the real protocol; wall times are given
where a promise is a time. A size that does not fit on the machine is extrapolated from a law fitted to three sizes,
and marked so.
"""

import argparse
import importlib

from report import end_like_interrupt, machine

SUBCOMMANDS = {
    "latency": ("scale_latency", "commits, a takeover and policy updates with a store that is far away"),
    "takeover": ("scale_takeover", "many runs on several orchestrators, one of which is killed"),
    "runs": ("scale_redis", "runs that have ended: start, idle, Redis, and the way back after a FLUSHALL"),
    "workers": ("scale_workers", "workers that one orchestrator holds: heartbeats, dispatch, an order to update"),
    "store": ("scale_store", "what a run leaves in the store with retention, and what a pass of it costs"),
    "audit": ("scale_audit", "an audit of a long run, one step after the other and in ranges by several processes"),
    "memory": ("scale_memory", "which process of a run grows with its steps"),
    "commits": ("scale_commits", "a commit and a takeover at step n; a commit of a large batch"),
}
"""By name, the module and what it measures."""


def main() -> None:
    """Run one subcommand and print its report."""
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, what) in SUBCOMMANDS.items():
        found = importlib.import_module(module)
        found.add_arguments(commands.add_parser(name, help=what, description=found.__doc__))
    options = parser.parse_args()
    report = importlib.import_module(SUBCOMMANDS[options.command][0]).report(options)
    print(f"{machine()}\n\n{report}")


if __name__ == "__main__":
    main()
