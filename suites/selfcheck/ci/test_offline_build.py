"""A bundle is built for the other machine, from the versions of the gpu lane."""

from __future__ import annotations

import subprocess
import tarfile
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from ci.nightly.__main__ import CPU_EXTRAS
from ci.nightly.checks import requirements
from ci.offline import __main__ as cli
from ci.offline import bundle
from harness.core.paths import ROOT
from harness.errors import UsageError
from harness.kernels.packages import WANTED


def test_download_asks_for_the_other_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    code = 0

    def child(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(bundle.subprocess, "run", child)
    machine = {"python": "3.12", "platform": "x86_64", "glibc": ["2_28"]}
    (tmp_path / "pack.whl").touch()
    found = bundle.download({"pack": "1.0"}, machine, tmp_path)
    assert found == [tmp_path / "pack.whl"]
    [command] = commands
    assert command[-1] == "pack==1.0"
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in command
    code = 1
    with pytest.raises(UsageError, match="cannot be downloaded"):
        bundle.download({"pack": "1.0"}, machine, tmp_path)


def test_pins_are_those_of_the_lane() -> None:
    spec = bundle.specification()
    read = [(ROOT / "ci" / f"constraints{kind}.txt").read_text() for kind in ("", "-gpu")]
    lines = "".join(read).lower().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    ours = spec["packages"] | spec["test"] | spec["cluster"] | {"torch": spec["machine"]["torch"]}
    for name, version in ours.items():
        assert pinned[name] == version, name
    for wanted in WANTED.values():
        name, version = wanted.split()
        assert spec["packages"][name] == version


@pytest.mark.parametrize("lane", cli.LANES)
def test_a_lane_lacks_no_requirement(lane: str) -> None:
    spec = bundle.specification()
    taken = {canonicalize_name(name) for table in spec["lanes"][lane] for name in spec[table]}
    machine = {"torch", *spec["machine"]["requirements"]}
    needed = {canonicalize_name(one.name) for one in requirements((*CPU_EXTRAS, "gpu"))}
    assert needed - taken <= machine


def test_a_lane_takes_its_tables_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = bundle.specification()
    asked: list[dict[str, str]] = []

    def download(packages: dict[str, str], *_: object) -> list[Path]:
        asked.append(packages)
        return []

    monkeypatch.setattr(bundle, "download", download)
    monkeypatch.setattr(bundle, "strip", lambda site, *_: site.mkdir())
    monkeypatch.setattr(bundle, "fetch_release", lambda *_: None)
    for lane in cli.LANES:
        bundle.build(tmp_path, 1 << 20, [lane])
    gpu, nightly, older, accept_lengths, bench, same, campaign, again, server, upstream, *rest = (
        asked
    )
    assert gpu == spec["packages"] | spec["test"]
    assert nightly == gpu | spec["sglang"]
    assert {"sglang", "altair", "schemathesis"} <= set(nightly)
    assert bench == campaign == server == nightly
    assert accept_lengths == nightly | spec["fa4"] | spec["nccl"]
    [(release, wanted)] = spec["releases"].items()
    assert older == same == again == wanted
    assert release == wanted["sglang"] != nightly["sglang"]
    assert wanted.keys() <= nightly.keys()
    assert upstream == nightly | spec["upstream"]
    assert upstream["sglang"] != nightly["sglang"]
    assert rest == [gpu | spec["cluster"]]
    asked.clear()
    bundle.build(tmp_path, 1 << 20, ["server", "cluster"])
    assert asked == [nightly | spec["cluster"]]


def test_a_release_that_serves_gets_its_own_wheels_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = bundle.specification()
    laid: list[tuple[str, str]] = []
    left_out: list[set[str]] = []

    def download(packages: dict[str, str], _: object, folder: Path) -> list[Path]:
        folder.mkdir(exist_ok=True)
        (folder / f"sglang-{packages['sglang']}.whl").touch()
        return sorted(folder.glob("*.whl"))

    def unpack(wheel: Path, site: Path, patterns: Iterable[str]) -> None:
        laid.append((wheel.stem, site.name))
        left_out.append({*patterns})

    monkeypatch.setattr(bundle, "download", download)
    monkeypatch.setattr(bundle, "unpack_wheel", unpack)
    monkeypatch.setattr(bundle, "strip", lambda site, *_: site.mkdir())
    monkeypatch.setattr(bundle, "fetch_release", lambda *_: None)
    bundle.build(tmp_path, 1 << 20, ["nightly"])
    [(release, wanted)] = spec["releases"].items()
    own = [(f"sglang-{spec['sglang']['sglang']}", "site"), (f"sglang-{wanted['sglang']}", release)]
    assert laid == own, f"a wheel lies where its own release is imported, nowhere else: {laid}"
    of_lane, of_release = (set(spec["left_out"][name]) for name in ("patterns", "of_releases"))
    told = "a release leaves out what the lane does, and more"
    assert left_out == [of_lane, of_lane | of_release], f"{told}: {left_out}"


def test_a_bundle_does_not_tell_who_built_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tarfile.TarFile.gettarinfo

    def of_somebody(self: tarfile.TarFile, *words: Any) -> tarfile.TarInfo:
        entry = found(self, *words)
        entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime = 1001, 1002, "one", "lab", 7
        return entry

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", of_somebody)
    (tmp_path / "site" / "package").mkdir(parents=True)
    (tmp_path / "site" / "package" / "module.py").write_text("1")
    bundle.pack(tmp_path / "site", tmp_path / "site.tar.xz")
    with tarfile.open(tmp_path / "site.tar.xz") as tar:
        told = {one.name: (one.uid, one.gid, one.uname, one.gname, one.mtime) for one in tar}
    nobody = dict.fromkeys(["package", "package/module.py"], (0, 0, "", "", 0))
    assert told == nobody, f"the same files are the same bundle, whoever packs them when: {told}"


@pytest.mark.parametrize(("text", "count"), [("1K", 1024), ("38M", 38 << 20), ("2G", 2 << 30)])
def test_size_is_read(text: str, count: int) -> None:
    assert cli.size(text) == count


@pytest.mark.parametrize("text", ["", "M", "0M", "38", "-1M", "1.5G"])
def test_impossible_size_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="--size"):
        cli.size(text)


def test_build_prints_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part"
    part.write_bytes(bytes(12345))
    asked: list[object] = []

    def stand_in(*args: object) -> list[Path]:
        asked.extend(args)
        return [part]

    monkeypatch.setattr(cli, "build", stand_in)
    assert cli.main(["build", "out", "--size", "1M", "--lane", "nightly"]) == 0
    assert asked == [Path("out"), 1 << 20, ["nightly"]]
    assert capsys.readouterr().out.split() == ["12,345", str(part)]
