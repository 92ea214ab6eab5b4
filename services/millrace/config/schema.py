"""The config sections that other rooms name. The classes live in one file per part."""

from millrace.config.sections.client import ClientConfig
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig

__all__ = ["ClientConfig", "EvalRunConfig", "OrchestratorConfig", "RLConfig", "SFTConfig"]
