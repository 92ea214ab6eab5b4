"""The config of runs: one schema with prime-rl's key names, its sources, and messages for everything that can be wrong.

One file per part holds the sections, and each field declares what it shares with other keys (`tree.Facts`). `load` lays
a command line, files and the environment over each other (`layers`), fills what is declared (`filling`), and checks it
(`check`); `validate_document` does so with a JSON document that arrives at a server. pydantic only: nothing heavy.
"""

from millrace.config.load import Loaded, load, validate_document
from millrace.config.section import run_hash
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.orchestrator import OrchestratorConfig, ZeroAdvantageFilter
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.shared import ClientConfig

__all__ = [
    "ClientConfig",
    "EvalRunConfig",
    "Loaded",
    "OrchestratorConfig",
    "RLConfig",
    "SFTConfig",
    "ZeroAdvantageFilter",
    "load",
    "run_hash",
    "validate_document",
]
