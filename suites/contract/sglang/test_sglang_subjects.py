"""What a release does not run is refused by name, and what it rounds is judged so in it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tables import find
from harness.core.case import Execution
from harness.plugin_subjects import plugin_subjects
from harness.sglang.backend import FLASHINFER_MHA
from harness.sglang.releases import RELEASES
from harness.sglang_subjects import SGLangSubject, sglang_subjects

NEWEST = "0.5.23"


def subject(version: str, name: str) -> SGLangSubject:
    """A release's subject, by backend and kernel."""
    found = {one.name.partition("/")[2]: one for one in sglang_subjects(RELEASES[version])}
    return found[name]


@pytest.mark.parametrize(
    ("version", "name", "row", "reason"),
    [
        (NEWEST, "trtllm_mha/trtllm_gen", "draft_extend_v2-dp_padding_whole_rows", None),
        (NEWEST, "trtllm_mha/trtllm_gen", "draft_extend_v2-width_6_dp_padding_off_width", "DP"),
        (NEWEST, "triton/triton", "draft_extend_v2-dp_padding_whole_rows", "DP padding"),
        (NEWEST, "triton/triton", "multi_step_draft-sinks_and_window", None),
        ("0.5.22", "triton/triton", "multi_step_draft-sinks_and_window", "no index tensors"),
        (NEWEST, "trtllm_mha/trtllm_gen", "multi_step_draft-sinks_and_window", "no index tensors"),
    ],
)
def test_what_a_release_does_not_produce_is_refused(
    version: str, name: str, row: str, reason: str | None
) -> None:
    found = subject(version, name).refusal(find(f"mha-{row}"), Execution.EAGER)
    told = f"{name} of {version} refuses {row}: {reason}" if reason else f"{name} runs {row}"
    assert (found is None) if reason is None else reason in (found or ""), f"{told}, not {found}"


def test_flashinfer_has_no_graph_of_a_draft_extend_v2_while_there_is_v1() -> None:
    case = find("mha-draft_extend_v2-bs2_ragged")
    refusing = {
        version
        for version, release in RELEASES.items()
        for one in sglang_subjects(release)
        if one.classes == FLASHINFER_MHA and one.refusal(case, Execution.GRAPH)
    }
    assert refusing == {"0.5.12", "0.5.13"}, "releases without v1 run it as a graph, too"


def test_the_query_is_scaled_by_its_batch_in_one_release() -> None:
    scaling = {
        version
        for version in RELEASES
        if subject(version, "trtllm_mha/trtllm_gen").numerics("cpu").scales_query
    }
    said = "a release that casts the query as it is is held to the oracle of the rounded query"
    assert scaling == {"0.5.14"}, said
    for own in plugin_subjects(RELEASES["0.5.14"]):
        assert not own.numerics("cpu").scales_query, "a backend of ours scales no query anywhere"


def test_releases_that_load_no_plugins_have_no_rows_of_ours() -> None:
    without = [version for version, release in RELEASES.items() if not plugin_subjects(release)]
    assert without == ["0.5.12", "0.5.13"]
    said = "a checkout loads plugins where the release that it is closest to does"
    for version in without:
        assert plugin_subjects(RELEASES[version], Path("checkout")) == (), said
