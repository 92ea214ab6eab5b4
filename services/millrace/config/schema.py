"""Every config section by name. The classes live in one file per part; this is where other rooms import them from."""

from millrace.config.client import ClientConfig
from millrace.config.eval import EvalRunConfig, FixedModelConfig, FixedSamplingConfig
from millrace.config.inference import InferenceConfig, InferenceModelConfig, ParallelConfig, ReplicaConfig, ServerConfig
from millrace.config.orchestrator import (
    AlgoConfig,
    EnvConfig,
    EvalConfig,
    EvalEnvConfig,
    EvalSamplingConfig,
    OrchestratorConfig,
    SamplingConfig,
)
from millrace.config.rl import RLConfig
from millrace.config.sft import SFTConfig, SFTDataConfig, SFTModelConfig
from millrace.config.shared import CheckpointConfig, LogConfig, ModelConfig, RunConfig, WandbConfig
from millrace.config.trainer import LossConfig, OptimConfig, SchedulerConfig, TrainerConfig, TrainerModelConfig

__all__ = [
    "AlgoConfig",
    "CheckpointConfig",
    "ClientConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalEnvConfig",
    "EvalRunConfig",
    "EvalSamplingConfig",
    "FixedModelConfig",
    "FixedSamplingConfig",
    "InferenceConfig",
    "InferenceModelConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "OrchestratorConfig",
    "ParallelConfig",
    "RLConfig",
    "ReplicaConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTModelConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "TrainerConfig",
    "TrainerModelConfig",
    "WandbConfig",
]
