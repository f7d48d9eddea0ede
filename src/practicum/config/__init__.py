"""The one config tree: a YAML file plus dotted `key=value` overrides."""

from practicum.config.actor import ActorConfig, LoraConfig, RouterReplayConfig
from practicum.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from practicum.config.base import Section
from practicum.config.critic import CriticConfig
from practicum.config.engines import ENGINES, Engine
from practicum.config.reward import CacheConfig, LimitsConfig, RewardConfig, RewardModelConfig, TermConfig
from practicum.config.rollout import AgentConfig, OpenAIConfig, RolloutConfig, VllmConfig
from practicum.config.tracking import WandbConfig
from practicum.config.tree import (
    Config,
    ControllerConfig,
    DataConfig,
    ModelConfig,
    TrainerConfig,
    ValidationConfig,
    known_keys,
    section_of,
)

__all__ = [
    "ENGINES",
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CacheConfig",
    "Config",
    "ControllerConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "Engine",
    "KLConfig",
    "LimitsConfig",
    "LoraConfig",
    "ModelConfig",
    "OpenAIConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RouterReplayConfig",
    "Section",
    "TermConfig",
    "TrainerConfig",
    "ValidationConfig",
    "VllmConfig",
    "WandbConfig",
    "known_keys",
    "section_of",
]
