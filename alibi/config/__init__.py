"""A run's config: a typed tree with all keys, a reader for values, and users' files."""

from alibi.config.files import (
    apply,
    as_config_dict,
    as_file,
    call,
    load_config,
    make_config,
    read_config,
    set_key,
    whole_sequences,
)
from alibi.config.model import ModelConfig
from alibi.config.tree import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    flatten,
    replaced,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "TrainConfig",
    "apply",
    "as_config_dict",
    "as_file",
    "call",
    "flatten",
    "load_config",
    "make_config",
    "read_config",
    "replaced",
    "set_key",
    "whole_sequences",
]
