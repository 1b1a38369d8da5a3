"""Models, and how they split into blocks."""

from atoll.runtime.models.adapter import (
    STYLES,
    Adapter,
    Block,
    DecoderAdapter,
    Loss,
    SequentialAdapter,
    Vocabulary,
    adapter_for,
    check_blocks,
    check_documents,
    reset_module,
    token_cross_entropy,
)
from atoll.runtime.models.batch import Batch
from atoll.runtime.models.counting import count
from atoll.runtime.models.decoder import Decoder, DecoderConfig
from atoll.runtime.models.initialise import (
    initial_values,
    initialise_block,
    initialise_model,
    name_seed,
    shared_parameters,
)
from atoll.runtime.models.mixture import MixtureConfig
from atoll.runtime.models.sizes import transformer_of
from atoll.runtime.models.weigh import relative_score, weigh_blocks
from atoll.runtime.models.weights import Weights, weights_for

__all__ = [
    "STYLES",
    "Adapter",
    "Batch",
    "Block",
    "Decoder",
    "DecoderAdapter",
    "DecoderConfig",
    "Loss",
    "MixtureConfig",
    "SequentialAdapter",
    "Vocabulary",
    "Weights",
    "adapter_for",
    "check_blocks",
    "check_documents",
    "count",
    "initial_values",
    "initialise_block",
    "initialise_model",
    "name_seed",
    "relative_score",
    "reset_module",
    "shared_parameters",
    "token_cross_entropy",
    "transformer_of",
    "weigh_blocks",
    "weights_for",
]
