"""The config sections that other rooms name. The classes live in one file per part."""

from millrace.config.client import ClientConfig
from millrace.config.eval import EvalRunConfig
from millrace.config.orchestrator import OrchestratorConfig
from millrace.config.rl import RLConfig
from millrace.config.sft import SFTConfig

__all__ = ["ClientConfig", "EvalRunConfig", "OrchestratorConfig", "RLConfig", "SFTConfig"]
