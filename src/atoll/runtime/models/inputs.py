"""Inputs of a Hugging Face model: ids, pixels or sound, and the decoder's input if it has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError

DECODER_IDS = "decoder_input_ids"


def main_input(model: nn.Module) -> str:
    """Return the name of the first block's input, as given by the model's class."""
    return str(getattr(model, "main_input_name", "input_ids"))


def example(model: nn.Module, rows: int, lengths: tuple[int, int]) -> dict[str, Tensor]:
    """Return zeros of the shapes of the model's inputs.

    lengths: of token ids, and of the decoder's input beside an encoder.
    """
    config: Any = model.config
    first = next(model.parameters())
    ids = torch.zeros(rows, lengths[0], dtype=torch.long, device=first.device)
    name = main_input(model)
    given = ids
    if name == "pixel_values":
        sizes = getattr(config, "vision_config", config)
        image = sizes.image_size if isinstance(sizes.image_size, (tuple, list)) else (sizes.image_size,) * 2
        given = torch.zeros(rows, sizes.num_channels, *image, dtype=first.dtype, device=first.device)
    elif name == "input_features":
        frames = 2 * config.max_source_positions  # Whisper: a convolution halves them
        given = torch.zeros(rows, config.num_mel_bins, frames, dtype=first.dtype, device=first.device)
    found = {name: given}
    if is_encoder_decoder(model):
        found[DECODER_IDS] = ids.new_zeros(rows, lengths[1])
    return found


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if the model has an encoder and a decoder, each with layers of its own."""
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False))


def decoder_ids(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the decoder's input: from the batch, or the labels shifted one to the right as the model does."""
    if DECODER_IDS in batch:
        return batch[DECODER_IDS]
    if "labels" not in batch:
        raise PlanError(f"{type(model).__name__} needs labels or {DECODER_IDS} in the batch, for its decoder")
    labels = batch["labels"]
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        shifted: Tensor = shift(labels)
        return shifted
    config = model.config
    start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    ids = torch.cat([start, labels[:, :-1]], dim=1)
    return ids.masked_fill(ids == -100, config.pad_token_id)
