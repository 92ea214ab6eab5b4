"""The config of runs: one schema with prime-rl's key names, its sources, and messages for everything that can be wrong.

`schema` holds the sections, `load` turns a command line, files and the environment into one, and `validate_document`
checks a JSON document that arrives at a server. Nothing heavy is imported here: pydantic only.
"""

from millrace.config.canonical import run_hash
from millrace.config.load import Loaded, load, validate_document
from millrace.config.schema import (
    EnvConfig,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
    TrainerConfig,
)

__all__ = [
    "EnvConfig",
    "EvalConfig",
    "InferenceConfig",
    "Loaded",
    "OrchestratorConfig",
    "RLConfig",
    "SFTConfig",
    "SamplingConfig",
    "TrainerConfig",
    "load",
    "run_hash",
    "validate_document",
]
