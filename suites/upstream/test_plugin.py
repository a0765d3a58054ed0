"""sglang's own plugin loader finds our backends, and nothing else of a server changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.plugin.served import SERVED
from harness.plugin.switches import PHASES
from harness.sglang.releases import find_release


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> dict[str, Any]:
    return driven(request.config)


@pytest.fixture(scope="module")
def delayed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return driven(request.config, "--gpu-delay")


@pytest.fixture(scope="module")
def timed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return driven(request.config, **{PHASES: "1"})


def driven(config: pytest.Config, *words: str, **switches: str) -> dict[str, Any]:
    version = config.getoption("--release")
    if version is None or config.getoption("--device") != "cpu":
        pytest.skip("needs --release VERSION and a CPU: specgate upstream")
    if not find_release(version).has_plugins:
        pytest.skip(f"sglang {version} loads no plugins")
    command = [sys.executable, "-m", "fixtures.drivers.registered_plugin", version, *words]
    done = subprocess.run(
        command,
        env=os.environ | switches,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_backend_can_be_chosen(loaded: dict[str, Any]) -> None:
    assert loaded["choices"] == loaded["registered"] == list(SERVED)


def test_a_prefill_beside_flash_mla_runs_per_head_and_keeps_its_chunks(
    loaded: dict[str, Any],
) -> None:
    assert loaded["methods"] == {
        "prefill on 9.0": "MHA_CHUNKED_KV",
        "prefill on 10.0": "MLA",
        "verify on 9.0": "MLA",
        "verify on 10.0": "MLA",
    }
    assert "MLA" in loaded["in graphs"]
    assert set(loaded["in graphs"]) <= {"MLA", None}
    assert loaded["chunked"] == [name for name in SERVED if name.startswith("specgate_mla")]


def test_latents_and_rotary_parts_are_not_joined_for_ours(loaded: dict[str, Any]) -> None:
    assert loaded["apart"] == [name for name in SERVED if name.startswith("specgate_mla")]


def test_every_hook_found_its_target(loaded: dict[str, Any]) -> None:
    # sglang only logs a hook whose target is gone.
    assert [name.rpartition(".")[2] for name in loaded["hooked"]] == [
        "check_server_args",
        "_create_backend",
        "capture_one_shape",
        "_capture_cuda_graphs",
    ]


def test_every_phase_found_what_it_begins_with(
    loaded: dict[str, Any], timed: dict[str, Any]
) -> None:
    added = sorted(set(timed["hooked"]) - set(loaded["hooked"]))
    assert [".".join(name.split(".")[-2:]) for name in added] == [
        "PluginBackend.init_cuda_graph_state",
        "PluginBackend.init_forward_metadata",
        "PluginBackend.init_forward_metadata_in_graph",
        "PluginBackend.init_forward_metadata_out_graph",
        "PluginBackend.update_verify_buffers_to_fill_after_draft",
        "PluginMultiStepDraftBackend.init_cuda_graph_state",
        "PluginMultiStepDraftBackend.init_forward_metadata",
        "PluginMultiStepDraftBackend.init_forward_metadata_in_graph",
        "Scheduler.get_internal_state",
        "eagle_utils.eagle_sample",
        "EAGLEWorkerV2.forward_batch_generation",
        "EAGLEWorkerV2.verify",
        "EagleDraftWorker._draft_extend_for_decode",
        "EagleDraftWorker.draft",
    ]


def test_verify_samples_by_the_function_that_is_timed(timed: dict[str, Any]) -> None:
    assert timed["samples"] == [True]


def test_the_factory_of_drafts_makes_ours_and_others(loaded: dict[str, Any]) -> None:
    assert loaded["created"] == [["PluginMultiStepDraftBackend", "2"], ["PluginBackend", "0"]]
    assert [name for name, _ in loaded["others"]] == ["Mock", "Mock"]


def test_a_draft_that_ours_do_not_serve_is_refused(loaded: dict[str, Any]) -> None:
    assert loaded["refused"] == [
        "attention of the model for specgate_mla = 'mha' is not accepted; accepted: mla",
        "KV pool of specgate_mha's draft = 'SWAKVPool' is not accepted; accepted: a draft whose "
        "layers see every key",
    ]


def test_padded_rows_of_a_draft_extend_have_room_for_its_queries(loaded: dict[str, Any]) -> None:
    # sglang's runner pads with this number, and a query before the first key reads what is there.
    assert loaded["fill_values"] == [4, 1, 1]


def test_draft_extend_is_captured_for_ours_alone(loaded: dict[str, Any]) -> None:
    assert loaded["captured"] == [True, False]


def test_only_ours_leave_out_the_choice_that_nobody_reads(loaded: dict[str, Any]) -> None:
    own, with_dead_topk, others = loaded["argmax"]
    assert with_dead_topk
    assert others
    assert not own


def test_a_delay_on_the_gpu_takes_three_more_hooks(
    loaded: dict[str, Any], delayed: dict[str, Any]
) -> None:
    more = {name.rpartition(".")[2] for name in {*delayed["hooked"]} - {*loaded["hooked"]}}
    assert more == {"forward", "slow_down", "get_internal_state"}


def test_the_target_waits_once_in_a_step_and_no_draft_does(delayed: dict[str, Any]) -> None:
    waits = {forward: count for forward, (count, made) in delayed["waits"].items()}
    assert waits == {
        "target's verify": 1,
        "target's decode": 1,
        "draft's decode": 0,
        "draft extend": 0,
        "prefill": 0,
    }
    assert {made for _, made in delayed["waits"].values()} == {"logits"}


def test_the_gpu_is_slowed_down_in_place_of_the_host(delayed: dict[str, Any]) -> None:
    # 60 µs and none: what sglang answers, how long its host sleeps, nanoseconds of the wait.
    assert delayed["told"] == [["SlowDownReqOutput", None, 60_000], ["SlowDownReqOutput", None, 0]]
