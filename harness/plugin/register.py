"""The entry point of the plugin: names, factories and hooks, as sglang's plugin interface has them.

``pip install specgate`` beside sglang is enough: sglang loads every entry point of the group
``sglang.srt.plugins`` in each of its processes. Nothing changes for servers that name no backend
of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from packaging.version import Version

from harness.core.capability import FLASH_MLA
from harness.core.case import Family
from harness.errors import UsageError
from harness.plugin.gpu_delay import GpuDelay
from harness.plugin.per_head_prefill import runs_per_head
from harness.plugin.served import SERVED, ServedBackend
from harness.plugin.switches import GPU_DELAY, PHASES, is_on

FIRST, RETURNS_STAMP = (0, 5, 14), (0, 5, 18)
"""Releases: older ones are left alone; from the second on a factory's entry returns a name, too."""
PREFILL_GRAPHS = ("is_in_tc_piecewise_cuda_graph", "is_in_breakable_cuda_graph")
"""What tells, as far as a release has it, that a prefill is captured or replayed: such a graph has
one way for all its batches."""


def register() -> None:
    """Register every backend of ours with the sglang of this process."""
    import sglang

    release = release_of(sglang.__version__)
    if release < FIRST:
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from harness.plugin.backend import new_plugin_backend
    from harness.plugin.draft_extend import capture_draft_extend, capture_one_shape

    server_args.add_attention_backend_choices(list(SERVED))
    for served in SERVED.values():
        register_attention_backend(served.name)(partial(new_plugin_backend, served))
        if served.family is Family.MLA:
            AttentionBackendRegistry.register(served.name, partial(forward_method, served))
            keep_chunked_prefix_cache(served.name)
            keep_rotary_parts_apart(served.name)
    eagle = "sglang.srt.speculative"
    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.server_args.ServerArgs.check_server_args": check_arguments,
        f"{eagle}.draft_utils.DraftBackendFactory._create_backend": partial(
            create_backend, release >= RETURNS_STAMP
        ),
        f"{eagle}.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs": capture_draft_extend,
        f"{eagle}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
        ".capture_one_shape": capture_one_shape,
    }
    chosen = [hooks]
    if is_on(GPU_DELAY):
        chosen.append(GpuDelay().hooks)
    if is_on(PHASES):
        from harness.plugin.phases import Recorder, phase_hooks

        chosen.append(phase_hooks(Recorder()))
    for target, hook in chain.from_iterable(one.items() for one in chosen):
        HookRegistry.register(target, hook, HookType.AROUND)


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a release; a candidate for it, or a build on the way to it, has the same."""
    return Version(version).release


def keep_chunked_prefix_cache(backend: str) -> None:
    """Keep sglang from turning ``MHA_CHUNKED_KV`` off for a backend that it does not know."""
    from sglang.srt import server_args as known

    if not hasattr(known, "add_chunked_prefix_cache_attention_backend"):  # older than 0.5.18
        from sglang.srt.model_executor import model_runner as known
    known.add_chunked_prefix_cache_attention_backend(backend)


def keep_rotary_parts_apart(backend: str) -> None:
    """Keep sglang from joining latents and rotary parts, two copies a layer that ours takes apart.

    It joins them for a backend that it does not know.
    """
    from sglang.srt.models.deepseek_common import utils

    known: list[str] = getattr(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", [])
    if backend not in known:
        known.append(backend)


def forward_method(served: ServedBackend, attention: Any, forward_batch: Any) -> Any:
    """How a forward of an MLA model runs: absorbed, but for eager prefills beside FlashMLA."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    in_graph = any(hasattr(handlers, name) and getattr(handlers, name)() for name in PREFILL_GRAPHS)
    if (
        not in_graph
        and runs_per_head(attention, forward_batch)
        and served.capability(forward_batch.seq_lens.device) is FLASH_MLA
    ):
        return AttnForwardMethod.MHA_CHUNKED_KV
    return AttnForwardMethod.MLA


def check_arguments(original: Callable[..., Any], arguments: Any, *rest: Any) -> Any:
    """Around ``ServerArgs.check_server_args``: what ours do not serve ends the launch."""
    from harness.plugin.launch import check_launch

    try:
        check_launch(arguments, arguments.device)
    except UsageError as refusal:
        raise SystemExit(f"specgate: {refusal}") from None
    return original(arguments, *rest)


def create_backend(
    returns_stamp: bool,
    original: Callable[..., Any],
    factory: Any,
    field: str,
    backend_map: dict[str, Callable[[], Any]],
    *rest: Any,
    **options: Any,
) -> Any:
    """Around ``DraftBackendFactory._create_backend``: its map gets ours."""
    from harness.plugin.backend import PluginMultiStepDraftBackend, new_plugin_backend

    runner = factory.draft_model_runner
    drafts = factory._create_triton_decode_backend in backend_map.values()

    def create(served: ServedBackend) -> Any:
        if drafts:
            made: Any = PluginMultiStepDraftBackend(served, runner, factory.speculative_num_steps)
        else:
            made = new_plugin_backend(served, runner)
        return (served.name, made) if returns_stamp else made

    ours = {served.name: partial(create, served) for served in SERVED.values()}
    return original(factory, field, backend_map | ours, *rest, **options)
