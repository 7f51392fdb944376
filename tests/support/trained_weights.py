"""Weights that a trainer has made of a dummy model's, as a folder and as tensors."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async.checkpoints.convert import convert


def train(folder: Path, seed: int, model: str = "dummy:tiny") -> dict[str, Tensor]:
    """Write a Hugging Face folder of float32 weights; returns its tensors."""
    convert(model, folder, to="huggingface", dtype="float32")
    (file,) = folder.glob("*.safetensors")
    chance = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + 2.0 * tensor.std() * torch.randn(tensor.shape, generator=chance)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors
