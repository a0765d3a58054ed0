"""A server that our backends cannot serve ends before it loads a model, with one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.case import Family
from harness.errors import UsageError
from harness.plugin import served as served_module
from harness.plugin.launch import check_launch, chosen
from harness.plugin.register import check_arguments, release_of
from harness.plugin.served import SERVED, device_of, served_kernel
from harness.plugin.switches import is_on

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def arguments(*, mla: bool = False, **changes: Any) -> Any:
    """Of a server on one of our backends, as ``ServerArgs`` has them once defaults are filled."""
    fields: dict[str, Any] = {
        "attention_backend": f"specgate_{'mla' if mla else 'mha'}",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_draft_attention_backend": None,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "page_size": 64,
        "kv_cache_dtype": "auto",
        "device": "cuda",
        "use_mla_backend": lambda: mla,
    }
    return SimpleNamespace(**fields | changes)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def take(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(served_module, "compute_capability", lambda device: capability)

    take(HOPPER)
    return take


@pytest.mark.parametrize(
    ("mla", "changes"),
    [
        (False, {}),
        (False, {"kv_cache_dtype": "fp8_e4m3", "page_size": 16}),
        # Both of sglang's names of one dtype.
        (False, {"kv_cache_dtype": "bfloat16"}),
        (False, {"kv_cache_dtype": "bf16"}),
        (False, {"speculative_eagle_topk": None, "speculative_num_draft_tokens": None}),
        (False, {"speculative_num_draft_tokens": 16}),
        (True, {"speculative_num_draft_tokens": 16}),
        (True, {}),
        # Another's server is none of our business.
        (True, {"attention_backend": "triton", "page_size": 1, "speculative_eagle_topk": 4}),
    ],
)
def test_what_the_kernels_serve_is_launched(
    mla: bool, changes: dict[str, Any], on_gpu: Any
) -> None:
    check_launch(arguments(mla=mla, **changes), "cuda")


@pytest.mark.parametrize(
    ("mla", "changes", "said"),
    [
        # The narrowest tree is no chain either.
        (False, {"speculative_eagle_topk": 2}, "speculative_eagle_topk = 2"),
        (False, {"speculative_eagle_topk": 4}, "speculative_eagle_topk = 4"),
        (False, {"page_size": 1}, "page_size = 1 is not accepted; accepted: 16, 32, 64, 128"),
        (True, {"page_size": 32}, "page_size = 32 is not accepted; accepted: 64"),
        (True, {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype = 'fp8_e4m3'"),
        (False, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = 'fp8_e5m2'"),
        (False, {"speculative_num_draft_tokens": 17}, "speculative_num_draft_tokens = 17"),
        (False, {"enable_mixed_chunk": True}, "enable_mixed_chunk = True"),
        (False, {"enable_dp_attention": True}, "enable_dp_attention = True"),
        (False, {"enable_two_batch_overlap": True}, "enable_two_batch_overlap = True"),
        (False, {"enable_hierarchical_cache": True}, "enable_hierarchical_cache = True"),
        (True, {"enable_deterministic_inference": True}, "enable_deterministic_inference = True"),
        (True, {"attention_backend": "specgate_mha"}, "attention of the model = 'mla'"),
        # A backend that serves one phase alone is checked, too.
        (
            False,
            {"attention_backend": "triton", "decode_attention_backend": "specgate_mha"}
            | {"page_size": 8},
            "page_size = 8",
        ),
        (
            False,
            {"attention_backend": "triton", "prefill_attention_backend": "specgate_mha"}
            | {"page_size": 8},
            "page_size = 8",
        ),
        (
            False,
            {"attention_backend": "triton", "speculative_draft_attention_backend": "specgate_mla"},
            "attention of the model = 'mha'",
        ),
        # And a second one beside one that serves.
        (
            False,
            {"speculative_draft_attention_backend": "specgate_mla"},
            "attention of the model = 'mha'",
        ),
    ],
)
def test_what_they_do_not_serve_is_refused_by_name(
    mla: bool, changes: dict[str, Any], said: str, on_gpu: Any
) -> None:
    given, told = arguments(mla=mla, **changes), f"a server of {changes} is refused for {said}"
    with pytest.raises(UsageError, match=f"^specgate_.*{said}") as refusal:
        pytest.fail(f"{told}, not accepted: {check_launch(given, 'cuda')}")
    assert "\n" not in str(refusal.value), f"a refusal is one line, not {refusal.value}"


def test_releases_whose_arguments_do_not_know_the_family_are_checked_otherwise(on_gpu: Any) -> None:
    newer = arguments(page_size=1)
    del newer.use_mla_backend
    with pytest.raises(UsageError, match="page_size = 1"):
        check_launch(newer, "cuda")


def test_blackwell_gets_trtllm_gen_and_its_limits(on_gpu: Any) -> None:
    on_gpu(BLACKWELL)
    check_launch(arguments(mla=True, page_size=32, kv_cache_dtype="fp8_e4m3"), "cuda")
    with pytest.raises(UsageError, match="page_size = 128"):
        check_launch(arguments(page_size=128), "cuda")


def test_a_gpu_without_a_kernel_is_refused_with_those_that_have_one(on_gpu: Any) -> None:
    on_gpu(AMPERE)
    with pytest.raises(UsageError, match=r"compute capability .*\(8, 0\).*9\.0 \(flash_mla\)"):
        check_launch(arguments(mla=True), "cuda")


def test_a_refusal_ends_the_launch_without_a_traceback(on_gpu: Any) -> None:
    called = []
    with pytest.raises(SystemExit, match=r"^specgate: specgate_mha: page_size = 1 "):
        check_arguments(called.append, arguments(page_size=1))
    assert called == []
    check_arguments(called.append, given := arguments())
    assert called == [given]


def test_a_target_and_a_draft_of_two_families_have_a_kernel_each() -> None:
    """Kernels of both families are named trtllm_gen, also where the reference stands in."""
    mla, mha, undone = (
        served_kernel(SERVED[name], "cpu")
        for name in ("specgate_mla", "specgate_mha", "specgate_mla-host_lengths")
    )
    told = "an MLA target and its MHA draft in one process each attend by their own family's kernel"
    assert [mla.capability.families, mha.capability.families] == [{Family.MLA}, {Family.MHA}], told
    assert undone is mla, "backends of one family share a kernel, with its workspace and its plans"


@pytest.mark.parametrize(("device", "told"), [("cuda", "cuda:3"), ("cpu", "cpu")])
def test_a_rank_has_its_kernel_on_its_own_gpu(device: str, told: str) -> None:
    found = device_of(SimpleNamespace(device=device, gpu_id=3))
    assert found == told, f"the fourth GPU's rank on {device} attends on {told}, not on {found}"


def test_each_gpu_of_a_process_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "_kernels", {})
    monkeypatch.setattr(served_module, "compute_capability", lambda device: HOPPER)
    monkeypatch.setattr(served_module, "new_kernel", lambda family, capability, device: [device])
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    found = [served_kernel(SERVED["specgate_mha"], device) for device in devices]
    told = "a kernel keeps its workspace and its plans on the GPU that it was made for"
    assert found == [[device] for device in devices], told
    assert found[0] is found[2], "a GPU that has a kernel gets no second one"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.14.post1", (0, 5, 14)),
        ("0.5.18rc2", (0, 5, 18)),
        ("0.5.24.dev7+g1a2b3c4", (0, 5, 24)),
    ],
)
def test_a_candidate_of_a_release_is_taken_for_it(version: str, numbers: tuple[int, ...]) -> None:
    assert release_of(version) == numbers


def test_a_switch_is_on_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    monkeypatch.delenv("SPECGATE_PHASES", raising=False)
    found[None] = is_on("SPECGATE_PHASES")
    for value in ("1", "0", ""):
        monkeypatch.setenv("SPECGATE_PHASES", value)
        found[value] = is_on("SPECGATE_PHASES")
    told = "a server's plugin times or delays its steps where the variable is 1, and nowhere else"
    assert found == {None: False, "1": True, "0": False, "": False}, told


def test_every_optimization_is_switched_off_by_name() -> None:
    assert set(SERVED) == {
        "specgate_mha",
        "specgate_mha-context_kernel",
        "specgate_mha-verify_fix_up",
        "specgate_mha-dead_topk",
        "specgate_mla",
        "specgate_mla-host_lengths",
        "specgate_mla-kv_indices",
    }
    plain = {name: SERVED[name] for name in ("specgate_mha", "specgate_mla")}
    for name, served in SERVED.items():
        own = plain[name.partition("-")[0]]
        undone = (served.backend, served.draft_backend, served.has_dead_topk)
        assert (undone == (own.backend, own.draft_backend, own.has_dead_topk)) == (name in plain)
    two = arguments(attention_backend="specgate_mha", decode_attention_backend="specgate_mha")
    assert [served.name for served in chosen(two)] == ["specgate_mha"]
