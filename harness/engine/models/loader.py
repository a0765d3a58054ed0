"""Models from checkpoints: one model, or a target and the draft with the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from harness.engine.models.checkpoint import (
    RawConfig,
    architecture_of,
    check_tensors,
    parse_config,
    random_checkpoint,
    read_tensors,
    read_text,
)
from harness.engine.models.decoder_layer import DecoderModel, TargetDecoder
from harness.engine.models.deepseek import DeepseekV3ForCausalLM
from harness.engine.models.eagle import LlamaForCausalLMEagle
from harness.engine.models.llama import LlamaForCausalLM
from harness.engine.models.nextn import DeepseekV3ForCausalLMNextN
from harness.errors import CheckpointError, rejected

TOKENIZER = "tokenizer.json"
Tensors = Mapping[str, torch.Tensor]
Checkpoint = tuple[RawConfig, Tensors]
KEPT_FLOAT32 = ("e_score_correction_bias",)

TARGETS: Mapping[str, Any] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
}
DRAFTS: Mapping[str, tuple[type[TargetDecoder], Any]] = {
    "LlamaForCausalLMEagle": (LlamaForCausalLM, LlamaForCausalLMEagle),
    "DeepseekV3ForCausalLMNextN": (DeepseekV3ForCausalLM, DeepseekV3ForCausalLMNextN),
}


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer (None where weights were drawn at random)."""

    target: TargetDecoder
    draft: DecoderModel
    tokenizer: Tokenizer | None = None


def load_pair(folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Pair:
    """The pair in ``folder/target`` and ``folder/draft``.

    Raises:
        CheckpointError: either checkpoint is broken (see `read_tensors`), they do not belong
            together, or their tokenizers differ from each other or from the vocabulary.
    """
    parts = (Path(folder) / "target", Path(folder) / "draft")
    target, draft = (read_tensors(part) for part in parts)
    pair = build_pair(target, draft, dtype, device)
    texts = [read_text(part / TOKENIZER) for part in parts]
    if texts[0] != texts[1]:
        raise CheckpointError(f"{parts[0] / TOKENIZER} and {parts[1] / TOKENIZER} differ")
    return Pair(pair.target, pair.draft, _tokenizer(texts[0], parts[0], pair.target))


def random_pair(
    target: RawConfig,
    draft: RawConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Pair:
    """A pair with random weights, for tests."""
    drawn = (target, random_checkpoint(target, seed)), (draft, random_checkpoint(draft, seed + 1))
    return build_pair(*drawn, dtype, device)


def build_pair(
    target: Checkpoint, draft: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Pair:
    """A pair from raw configurations and tensors.

    Raises:
        CheckpointError: the two do not belong together, or a tensor does not fit.
    """
    built = build_target(*target, dtype, device)
    return Pair(built, build_draft(*draft, built, dtype, device))


def build_target(
    raw: RawConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> TargetDecoder:
    """A model that reads tokens alone.

    Raises:
        CheckpointError: the architecture is a draft's, or a tensor does not fit.
    """
    name = architecture_of(raw)
    if name not in TARGETS:
        raise CheckpointError(rejected("target architecture", name, f"one of {list(TARGETS)}"))
    model: TargetDecoder = TARGETS[name](parse_config(raw), _placed(raw, tensors, dtype, device))
    return model


def build_draft(
    raw: RawConfig,
    tensors: Tensors,
    target: TargetDecoder,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> DecoderModel:
    """A model that continues from the hidden states of ``target`` and shares its vocabulary.

    Raises:
        CheckpointError: it was made for another target, or a tensor does not fit.
    """
    name = architecture_of(raw)
    accepted = [draft for draft, (made_for, _) in DRAFTS.items() if isinstance(target, made_for)]
    if name not in accepted:
        raise CheckpointError(rejected("draft architecture", name, f"one of {accepted}"))
    config = parse_config(raw)
    for key in ("vocab_size", "hidden_size"):
        given, needed = getattr(config, key), getattr(target.config, key)
        if given != needed:
            raise CheckpointError(rejected(f"draft's {key}", given, f"the target's {needed}"))
    model: DecoderModel = DRAFTS[name][1](config, _placed(raw, tensors, dtype, device), target)
    return model


def _placed(
    raw: RawConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Checked tensors on ``device`` in ``dtype``; routing biases stay float32, as upstream."""
    check_tensors(raw, tensors)
    return {
        name: w.to(device, torch.float32 if name.endswith(KEPT_FLOAT32) else dtype)
        for name, w in tensors.items()
    }


def _tokenizer(text: str, folder: Path, target: TargetDecoder) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception and nothing narrower
        raise CheckpointError(f"{folder / TOKENIZER} is no tokenizer: {error}") from error
    size = tokenizer.get_vocab_size()
    if size != target.config.vocab_size:
        accepted = f"vocab_size = {target.config.vocab_size}"
        raise CheckpointError(rejected(f"vocabulary of {folder / TOKENIZER}", size, accepted))
    return tokenizer
