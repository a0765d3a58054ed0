"""Releases of sglang that can be put on trial: a row each, and what it brings along."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError, rejected

FOLDER = "SPECGATE_UPSTREAM"
NEWEST = "0.5.23"


@dataclass(frozen=True)
class Release:
    """One release.

    Args:
        version: of sglang.
        transformers: the version that its wheel pins.
        has_draft_extend_v1: whether ForwardMode.DRAFT_EXTEND exists.
        has_runtime_context: whether configuration is published through ``runtime_context``'s
            ``override_server_args``; before it, through module globals.
        has_parallel_context: whether ranks are read through ``get_parallel``.
        has_platform: whether GPU generations are read through ``get_platform``.
        scales_query: whether trtllm_mha divides an FP8 query by a scale of its batch.
        packs_query: whether trtllm_mha packs the query of a verify or extend itself.
        prefills_on_sm90: whether trtllm_mha serves prefill on SM90, by fmha_v2; before it, server
            arguments refuse it there.
        fuses_mla_rope: whether trtllm_mla rotates itself what it casts to FP8 in decode and verify.
        bundles_locations: whether ``KVWriteLoc.for_batch`` makes what an MLA pool is written by.
        plans_in_three_phases: whether graphs plan by ``init_forward_metadata_out_graph`` and
            ``_in_graph``; before them by the pair of capture and replay.
        has_plugins: whether it loads entry points of the group ``sglang.srt.plugins``.
    """

    version: str
    transformers: str
    has_draft_extend_v1: bool = False
    has_runtime_context: bool = True
    has_parallel_context: bool = True
    has_platform: bool = True
    prefills_on_sm90: bool = True
    packs_query: bool = True
    scales_query: bool = False
    fuses_mla_rope: bool = False
    bundles_locations: bool = True
    plans_in_three_phases: bool = True
    has_plugins: bool = True


# What several releases in a row lack.
OF_LOCATIONS = {"bundles_locations": False}
OF_SM100 = {
    **OF_LOCATIONS,
    "has_platform": False,
    "prefills_on_sm90": False,
    "packs_query": False,
}
OF_ROPE = {**OF_SM100, "fuses_mla_rope": True}
OF_GLOBALS = {**OF_ROPE, "has_runtime_context": False}
OF_V1 = {"has_draft_extend_v1": True, "has_parallel_context": False, "has_plugins": False}

RELEASES = {
    release.version: release
    for release in (
        Release("0.5.12", "5.6.0", **OF_GLOBALS, **OF_V1, plans_in_three_phases=False),
        Release("0.5.13", "5.8.1", **OF_GLOBALS, **OF_V1),
        Release("0.5.14", "5.8.1", **OF_GLOBALS, scales_query=True),
        Release("0.5.16", "5.12.1", **OF_ROPE),
        Release("0.5.18", "5.12.1", **OF_SM100),
        Release("0.5.20", "5.12.1", **OF_LOCATIONS),
        Release("0.5.22", "5.19.0"),
        Release("0.5.23", "5.19.0"),
    )
}


def find_release(version: str) -> Release:
    """The row of a version.

    Raises:
        UsageError: there is none.
    """
    if version not in RELEASES:
        raise UsageError(rejected("release", version, ", ".join(RELEASES)))
    return RELEASES[version]


def cache() -> Path:
    """The folder of unpacked wheels and of the packages they import."""
    given = os.environ.get(FOLDER)
    return Path(given).absolute() if given else Path.home() / ".cache/specgate/upstream"


def source_of(release: Release) -> Path:
    """The folder that holds ``sglang/`` of a release."""
    return cache() / f"sglang-{release.version}"


def packages_of(release: Release) -> Path:
    """The folder of the packages that a release imports."""
    return cache() / f"transformers-{release.transformers}"
