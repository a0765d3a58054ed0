"""Checkpoints in Hugging Face layout: read from a folder or drawn at random, and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from harness.engine.models import shapes
from harness.engine.models.config import DecoderConfig, DeepseekConfig, LlamaConfig, NextnConfig
from harness.errors import CheckpointError, rejected

RawConfig = Mapping[str, Any]
CheckpointTensors = dict[str, torch.Tensor]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Architecture:
    """The configuration class and the tensor shapes of an architecture."""

    config: type[DecoderConfig]
    shapes: Callable[[Any], shapes.Shapes]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(LlamaConfig, shapes.llama),
    "LlamaForCausalLMEagle": Architecture(LlamaConfig, shapes.eagle),
    "DeepseekV3ForCausalLM": Architecture(DeepseekConfig, shapes.deepseek),
    "DeepseekV3ForCausalLMNextN": Architecture(NextnConfig, shapes.nextn),
}


def architecture_of(raw: RawConfig) -> str:
    """The one architecture a ``config.json`` names.

    Raises:
        CheckpointError: none, several, or one that is not implemented.
    """
    named = raw.get("architectures")
    for name in ARCHITECTURES:
        if named == [name]:
            return name
    raise CheckpointError(rejected("architectures", named, f"one of {sorted(ARCHITECTURES)}"))


def parse_config(raw: RawConfig) -> DecoderConfig:
    """The typed configuration of ``raw``.

    Raises:
        CheckpointError: an unknown architecture, or a key that is missing, mistyped or unsupported.
    """
    return ARCHITECTURES[architecture_of(raw)].config.parse(raw)


def expected_shapes(raw: RawConfig) -> shapes.Shapes:
    """Every tensor name a checkpoint with this configuration has, and its shape."""
    return ARCHITECTURES[architecture_of(raw)].shapes(parse_config(raw))


def read_tensors(folder: str | Path) -> tuple[dict[str, Any], CheckpointTensors]:
    """``config.json`` and the tensors of ``folder`` as they are stored, checked against each other.

    Raises:
        CheckpointError: a file is missing or truncated, a tensor is missing, unexpected or of
            another shape than the configuration says.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG)
    path = require_file(folder / WEIGHTS)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error
    try:
        check_tensors(raw, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return raw, tensors


def check_tensors(raw: RawConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare names and shapes with what the configuration implies.

    Raises:
        CheckpointError: naming the first tensor that is missing, unexpected or misshapen.
    """
    expected = expected_shapes(raw)
    for what, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(f"{len(names)} tensors {what}, the first is {min(names)}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(rejected(f"shape of {name}", tuple(tensors[name].shape), shape))


def random_checkpoint(raw: RawConfig, seed: int) -> CheckpointTensors:
    """Float32 tensors for a configuration, scaled so that activations stay near one.

    Norm weights lie around one and biases around zero, none of them exactly there, so that a
    forgotten one is seen.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return float("norm" in name) + 0.1 * noise
        return noise if "embed_tokens" in name else noise / math.sqrt(shape[-1])

    return {name: draw(name, shape) for name, shape in expected_shapes(raw).items()}


def require_file(path: Path) -> Path:
    """``path``, which must be a file.

    Raises:
        CheckpointError: it is not.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    return path


def read_text(path: Path) -> str:
    """The text in ``path``.

    Raises:
        CheckpointError: there is no such file, or it is not in UTF-8.
    """
    try:
        return require_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(rejected(str(path), content, "a JSON object"))
    return content
