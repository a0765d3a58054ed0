"""A folder of goldens: tensors and facts by group, and a manifest with the digest of every file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from harness.errors import GoldenError

GOLDEN_FORMAT = 2
MANIFEST = "manifest.json"
SUFFIXES = ("safetensors", "json")

Manifest = dict[str, Any]
Content = tuple[dict[str, torch.Tensor], dict[str, Any]]


def empty_manifest() -> Manifest:
    """The manifest of a folder without goldens."""
    return {"format": GOLDEN_FORMAT, "files": {}, "entries": {}}


def read_manifest(folder: Path) -> Manifest:
    """The manifest, an empty one where the folder has none.

    Raises:
        GoldenError: it is no JSON of this format, it does not list every file of the folder, or
            it is missing beside files.
    """
    path = folder / MANIFEST
    if not path.is_file() and _data_files(folder):
        raise GoldenError(f"{path} is missing")
    manifest = _parsed(path) if path.is_file() else empty_manifest()
    if strays := sorted(_data_files(folder) - manifest["files"].keys()):
        raise GoldenError(f"{folder / strays[0]} is an orphan: {MANIFEST} does not know it")
    return manifest


def _parsed(path: Path) -> Manifest:
    try:
        manifest: Manifest = json.loads(path.read_bytes())
        # Before anything that another format may not have.
        if (found := manifest["format"]) != GOLDEN_FORMAT:
            raise GoldenError(f"{path} has format {found}, expected {GOLDEN_FORMAT}")
        expected = {f"{group}.{suffix}" for group in manifest["entries"] for suffix in SUFFIXES}
        whole = manifest["files"].keys() == expected
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path} is corrupt: {error!r}") from error
    if not whole:
        raise GoldenError(f"{path} is corrupt: its files are not those of its entries")
    return manifest


def _data_files(folder: Path) -> set[str]:
    found = {path.name for suffix in SUFFIXES for path in folder.glob(f"*.{suffix}")}
    return found - {MANIFEST}


def read_group(folder: Path, group: str, manifest: Manifest) -> Content:
    """Tensors by "key/name" and facts by key.

    Raises:
        GoldenError: a file is missing or is not what the manifest says.
    """
    data: dict[str, bytes] = {}
    for suffix in SUFFIXES:
        path = folder / f"{group}.{suffix}"
        if not path.is_file():
            raise GoldenError(f"{path} is missing")
        data[suffix] = path.read_bytes()
        if hashlib.sha256(data[suffix]).hexdigest() != manifest["files"].get(path.name):
            raise GoldenError(f"{path} is corrupt: its digest is not the one in {MANIFEST}")
    try:
        tensors, facts = safetensors.torch.load(data["safetensors"]), json.loads(data["json"])
    except (ValueError, SafetensorError) as error:
        raise GoldenError(f"{folder / group} is corrupt: {error!r}") from error
    if facts.keys() != manifest["entries"][group].keys():
        raise GoldenError(f"{folder / MANIFEST} does not list what {group}.json holds")
    return tensors, facts


def write_groups(folder: Path, manifest: Manifest, groups: Mapping[str, Content]) -> None:
    """Write whole files, the manifest last; then files that it does not know are removed.

    Raises:
        GoldenError: the folder cannot be written.
    """
    entries = {group: own for group, own in manifest["entries"].items() if own}
    files: dict[str, bytes] = {}
    for group in entries.keys() & groups.keys():
        tensors, facts = groups[group]
        files[f"{group}.safetensors"] = safetensors.torch.save(tensors)
        files[f"{group}.json"] = _json(facts)
    names = {f"{group}.{suffix}" for group in entries for suffix in SUFFIXES}
    digests = manifest["files"] | {name: hashlib.sha256(d).hexdigest() for name, d in files.items()}
    kept = {name: digests[name] for name in names}
    files[MANIFEST] = _json({"format": GOLDEN_FORMAT, "files": kept, "entries": entries})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace_all(folder, files)
        for name in _data_files(folder) - names:
            (folder / name).unlink()
    except OSError as error:
        raise GoldenError(f"{folder} cannot be written: {error}") from error


def _replace_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """All bytes reach the disk under other names before the first one takes its place."""
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as beside:
        for name, data in files.items():
            (Path(beside) / name).write_bytes(data)
        for name in files:
            os.replace(Path(beside) / name, folder / name)


def _json(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
