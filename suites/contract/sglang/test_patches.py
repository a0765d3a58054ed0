"""A CPU runs something else in the place of what needs CUDA, wherever a release keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.tables import CASES
from harness.sglang import context, patches
from harness.sglang.patches import WithoutCUDA, apply_patches, scaled_fp8_quant
from harness.sglang.releases import RELEASES
from harness.sglang.triton_attention import interpret

FP8 = torch.float8_e4m3fn


def released(monkeypatch: pytest.MonkeyPatch, **names: tuple[str, ...]) -> dict[str, Any]:
    """Modules of a release, below ``sglang.``, each with the functions that it has."""
    modules = {
        module.replace("__", "."): SimpleNamespace(
            **{name: lambda name=name, **_: f"sglang's {name}" for name in functions}
        )
        for module, functions in names.items()
    }

    def import_module(name: str) -> Any:
        if name.removeprefix("sglang.") not in modules:
            raise ModuleNotFoundError(name)
        return modules[name.removeprefix("sglang.")]

    monkeypatch.setattr(patches, "import_module", import_module)
    apply_patches()
    return modules


def test_a_function_is_replaced_where_an_older_release_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, decode = "fused_fp8_qkv_kv_cache", "decode_attention_fwd"
    own: dict[str, tuple[str, ...]] = {
        f"jit_kernel__{fused}": (fused,),
        "srt__utils__common": ("is_sm90_supported",),
        "srt__utils": ("is_sm90_supported", "is_hip"),
        "srt__layers__attention__triton_ops__decode_attention": (decode,),
    }
    modules = released(monkeypatch, **own)
    replaced = patches.fused_fp8_qkv_kv_cache
    assert getattr(modules[f"jit_kernel.{fused}"], fused) is replaced, "not where newer ones do"
    for name in ("srt.utils.common", "srt.utils"):
        told = f"{name} hands the name on, so that each of both is replaced"
        assert isinstance(modules[name].is_sm90_supported(), bool), told
    assert modules["srt.utils"].is_hip() == "sglang's is_hip"
    kept = modules["srt.layers.attention.triton_ops.decode_attention"].decode_attention_fwd
    interpret(True)
    try:
        assert kept() == f"sglang's {decode}", "a trial that asks for it has the release's own"
    finally:
        interpret(False)


def test_an_fp8_cast_is_by_the_scale_that_it_is_given_or_by_the_greatest_value() -> None:
    x = torch.tensor([896.0, -2.0])
    made, scale = scaled_fp8_quant(x)
    told = f"a cast without a scale has that of its greatest value, 896 / 448, not {scale.tolist()}"
    assert (made.dtype, made.tolist(), scale.tolist()) == (FP8, [448.0, -1.0], [2.0]), told
    given = torch.tensor([4.0])
    made, scale = scaled_fp8_quant(x, given)
    told = (
        f"a cast with a scale of 4 is [224.0, -0.5] and hands the scale back, not {made.tolist()}"
    )
    assert scale is given, told
    assert (made.tolist(), given.tolist()) == ([224.0, -0.5], [4.0]), told


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 1)], ids=str)
def test_memory_that_is_asked_for_on_any_gpu_is_the_cpus(device: torch.device | str) -> None:
    told = f"memory that is asked for on {device}, or pinned, is the CPU's and is not pinned"
    try:
        with WithoutCUDA():
            made = torch.zeros(2, dtype=torch.int32, device=device, pin_memory=True)
            moved = made.to(device=device, non_blocking=True)
    except (AssertionError, RuntimeError) as error:
        pytest.fail(f"{told}: {error}")
    for tensor in (made, moved):
        assert (tensor.device.type, tensor.is_pinned()) == ("cpu", False), told


def test_every_trial_is_served_by_the_kernels_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(context, "active", lambda: RELEASES["0.5.13"])
    monkeypatch.setattr(context, "run_on", told.append)
    monkeypatch.setattr(context, "interpret", told.append)
    monkeypatch.setattr(context.module_globals, "publish_ranks", lambda: None)
    monkeypatch.setattr(context.module_globals, "publish_server_arguments", dict)
    wanted = {
        "interpreted": ["sm90", True],
        "triton": ["sm90", False],  # no kernel of the trial before it
        "flashinfer": ["sm90", False],
        "trtllm_gen": ["sm100", False],
        "xqa": ["sm90", False],
    }
    for kernel, says in wanted.items():
        told.clear()
        context.publish(CASES["mha-decode-bs1_short"], "triton", kernel, "cpu")
        rule = "a trial sets its GPU and whether kernels are interpreted, whatever ran before it"
        assert told == says, f"{rule}: {kernel} {says}, not {told}"
