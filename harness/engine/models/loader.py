"""From a checkpoint to models: one model, or a target and the draft that shares its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from harness.engine.models.checkpoint import (
    ARCHITECTURES,
    RawConfig,
    architecture_of,
    check_tensors,
    parse_config,
    random_checkpoint,
    read_tensors,
    require_file,
)
from harness.engine.models.decoder import Decoder, TargetDecoder
from harness.engine.models.deepseek import DeepseekV3ForCausalLM
from harness.engine.models.eagle import LlamaForCausalLMEagle
from harness.engine.models.llama import LlamaForCausalLM
from harness.engine.models.nextn import DeepseekV3ForCausalLMNextN
from harness.errors import CheckpointError, rejected

TOKENIZER = "tokenizer.json"
KEPT_FLOAT32 = ("e_score_correction_bias",)

TARGETS: Mapping[str, Any] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
}
DRAFTS: Mapping[str, Any] = {
    "LlamaForCausalLMEagle": LlamaForCausalLMEagle,
    "DeepseekV3ForCausalLMNextN": DeepseekV3ForCausalLMNextN,
}


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer (None where weights were drawn at random)."""

    target: TargetDecoder
    draft: Decoder
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
    texts = [require_file(part / TOKENIZER).read_text(encoding="utf-8") for part in parts]
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
    target: tuple[RawConfig, Mapping[str, torch.Tensor]],
    draft: tuple[RawConfig, Mapping[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Pair:
    """A pair from raw configurations and tensors.

    Raises:
        CheckpointError: the two do not belong together, or a tensor does not fit.
    """
    models = tuple(architecture_of(raw) for raw, _ in (target, draft))
    drafts_for = ARCHITECTURES[models[1]].drafts_for
    if drafts_for is None or drafts_for != models[0]:
        drafts = [name for name, a in ARCHITECTURES.items() if a.drafts_for == models[0]]
        raise CheckpointError(rejected(f"draft of {models[0]}", models[1], f"one of {drafts}"))
    for key in ("vocab_size", "hidden_size"):
        if target[0].get(key) != draft[0].get(key):
            accepted = f"the target's {target[0].get(key)}"
            raise CheckpointError(rejected(f"draft's {key}", draft[0].get(key), accepted))
    built = TARGETS[models[0]](parse_config(target[0]), placed(*target, dtype, device))
    drafted = DRAFTS[models[1]](parse_config(draft[0]), placed(*draft, dtype, device), built)
    return Pair(built, drafted)


def placed(
    raw: RawConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
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
