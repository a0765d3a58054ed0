"""A broken checkpoint is refused with one line that names what is wrong."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from fixtures.drivers.tiny_models import GQA_TARGET, TINY_PAIRS
from harness.engine.models.checkpoint import expected_shapes, random_checkpoint, read_tensors
from harness.engine.models.loader import build_target, load_pair
from harness.errors import CheckpointError


def write_tokenizer(folder, words, *, step=1):
    vocabulary = {f"w{i}": number for i, number in enumerate(range(words)[::step])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=TINY_PAIRS)
def shipped(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    for part, raw in zip(("target", "draft"), TINY_PAIRS[request.param], strict=True):
        folder = root / part
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(random_checkpoint(raw, 7), folder / "model.safetensors")
        write_tokenizer(folder, 97)
    return root


@pytest.fixture
def pair(shipped, tmp_path):
    return shutil.copytree(shipped, tmp_path / "pair")


def configured(part, **changes):
    def change(pair):
        path = pair / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(name):
    return lambda pair: (pair / name).unlink()


def written(name, text):
    return lambda pair: (pair / name).write_text(text)


def bytes_written(name, data):
    return lambda pair: (pair / name).write_bytes(data)


def truncated(pair):
    path = pair / "draft/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def tensors_changed(change):
    def rewrite(pair):
        path = pair / "target/model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


def retokenized(words, *parts):
    return lambda pair: [write_tokenizer(pair / part, words) for part in parts]


def misshape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].contiguous()


def draft_for_target(pair):
    shutil.rmtree(pair / "target")
    shutil.copytree(pair / "draft", pair / "target")


def target_for_draft(pair):
    shutil.rmtree(pair / "draft")
    shutil.copytree(pair / "target", pair / "draft")


BROKEN = {
    "no folder": (lambda pair: shutil.rmtree(pair / "draft"), r"draft/config\.json does not exist"),
    "no weights": (without("draft/model.safetensors"), r"draft/model\.safetensors does not exist"),
    "no tokenizer": (without("draft/tokenizer.json"), r"draft/tokenizer\.json does not exist"),
    "truncated weights": (truncated, r"draft/model\.safetensors is truncated"),
    "weights that are text": (written("target/model.safetensors", "hello"), "is truncated or no"),
    "config that is cut": (written("target/config.json", '{"vocab'), r"config\.json is no JSON"),
    "config that is a list": (written("target/config.json", "[1]"), r"accepted: a JSON object"),
    "config that is no text": (
        bytes_written("draft/config.json", b'{"vocab_size": "\xff"}'),
        r"draft/config\.json is no UTF-8: .*byte 0xff in position 16",
    ),
    "tokenizer that is no text": (
        bytes_written("draft/tokenizer.json", b"\xfe{}"),
        r"draft/tokenizer\.json is no UTF-8: .*byte 0xfe in position 0",
    ),
    "missing tensor": (
        tensors_changed(lambda tensors: tensors.pop("model.norm.weight")),
        r"target: 1 tensors missing, the first is model\.norm\.weight",
    ),
    "unexpected tensor": (
        tensors_changed(lambda tensors: tensors.update({"extra.weight": torch.ones(1)})),
        r"target: 1 tensors unexpected, the first is extra\.weight",
    ),
    "misshapen tensor": (
        tensors_changed(misshape),
        r"target: shape of lm_head\.weight = \(97, 47\) is not accepted; accepted: \(97, 48\)",
    ),
    "config of another shape": (
        configured("target", intermediate_size=81),
        r"shape of model\.layers\.0\.mlp\.gate_proj\.weight = \(80, 48\)",
    ),
    "unknown architecture": (
        configured("target", architectures=["GPT2LMHeadModel"]),
        r"architectures = \['GPT2LMHeadModel'\] is not accepted; accepted: one of \['Deep",
    ),
    "architectures in a list of their own": (
        configured("target", architectures=[["LlamaForCausalLM"]]),
        r"architectures = \[\['LlamaForCausalLM'\]\] is not accepted; accepted: one of",
    ),
    "two architectures": (
        configured("target", architectures=["LlamaForCausalLM", "DeepseekV3ForCausalLM"]),
        r"architectures = \['LlamaForCausalLM', 'DeepseekV3ForCausalLM'\] is not accepted",
    ),
    "no architecture": (configured("target", architectures=None), "architectures = None"),
    "draft as target": (draft_for_target, r"target architecture = '\w+(Eagle|NextN)'"),
    "target as draft": (target_for_draft, r"draft architecture = '\w+ForCausalLM' is not"),
    "draft of other words": (retokenized(98, "draft"), r"target/tokenizer\.json and .*differ"),
    "draft that counts words backwards": (
        lambda pair: write_tokenizer(pair / "draft", 97, step=-1),
        r"target/tokenizer\.json and .*differ",
    ),
    "tokenizer of other words": (
        retokenized(98, "target", "draft"),
        r"vocabulary of .*target/tokenizer\.json = 98 is not accepted; accepted: vocab_size = 97",
    ),
    "tokenizer of fewer words": (
        retokenized(96, "target", "draft"),
        r"vocabulary of .*target/tokenizer\.json = 96 is not accepted; accepted: vocab_size = 97",
    ),
    "tokenizer that is none": (
        lambda pair: [written(f"{p}/tokenizer.json", "{}")(pair) for p in ("target", "draft")],
        r"target/tokenizer\.json is no tokenizer",
    ),
}


def test_shared_experts_are_one_mlp_as_wide_as_all_of_them():
    _, draft = TINY_PAIRS["mla"]
    found = expected_shapes(draft | {"n_shared_experts": 3})
    hidden, inner = draft["hidden_size"], 3 * draft["moe_intermediate_size"]
    due = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for part, shape in due.items():
        name = f"model.layers.0.mlp.shared_experts.{part}.weight"
        told = f"{name} has the widths of three experts, {shape}, not {found[name]}"
        assert found[name] == shape, told


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_pair_is_refused(pair, damage, message):
    damage(pair)
    with pytest.raises((CheckpointError, ValueError)) as refusal:
        load_pair(pair, torch.float32)
    told = f"a CheckpointError of one line says {message!r}, not {refusal.value!r}"
    assert isinstance(refusal.value, CheckpointError), told
    assert re.search(message, str(refusal.value)), told
    assert "\n" not in str(refusal.value), told


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
def test_a_draft_of_another_size_is_refused(pair, key):
    path = pair / "draft/config.json"
    raw = json.loads(path.read_text())
    raw[key] += 2
    path.write_text(json.dumps(raw))
    save_file(random_checkpoint(raw, 7), pair / "draft/model.safetensors")
    with pytest.raises(CheckpointError, match=f"draft's {key} = {raw[key]} .* the target's"):
        load_pair(pair, torch.float32)


def test_an_intact_pair_loads(pair):
    found = load_pair(pair, torch.bfloat16)
    assert found.tokenizer.encode("w5").ids == [5]
    raw, tensors = read_tensors(pair / "target")
    assert raw == json.loads((pair / "target/config.json").read_text())
    told = "a target whose checkpoint has an lm_head predicts by that, not by its embeddings"
    assert torch.equal(found.target.lm_head, tensors["lm_head.weight"].bfloat16()), told
    assert found.draft.lm_head is found.target.lm_head
    assert found.draft.embed_tokens is found.target.embed_tokens


def test_the_routing_bias_stays_float32(shipped):
    draft = load_pair(shipped, torch.bfloat16).draft
    kept = {name for name, w in draft.weights.items() if w.dtype == torch.float32}
    routed = "mlp.gate.e_score_correction_bias"
    assert kept == ({routed} if routed in draft.weights else set())


def test_random_weights_depend_on_the_seed_alone():
    first, again, other = (random_checkpoint(GQA_TARGET, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_tied_head_is_the_embedding():
    raw = GQA_TARGET | {"tie_word_embeddings": True}
    tensors = random_checkpoint(raw, 1)
    assert "lm_head.weight" not in tensors
    model = build_target(raw, tensors, torch.float32)
    assert model.lm_head is model.embed_tokens
