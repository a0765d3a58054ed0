"""A bundle holds what the gpu lane needs, travels in parts and runs the lane's own command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from ci.offline import __main__ as cli
from ci.offline import bundle, checkout_metadata, run
from harness.core.paths import ROOT
from harness.core.signals import INTERRUPTED
from harness.errors import UsageError
from harness.upstream.released_wheel import WHEELS, Wheel

LEFT_OUT = ["*/huge.so", "pack/sm100/*", "*/tests/*", "*.data/scripts/*"]
PROGRAM = "pack/core/daemon"
WHEEL = {
    "pack/__init__.py": b"version = 1",
    "pack/data/kernel.cu": b"\0" * 5000 + bytes(range(256)) * 20,
    "pack/huge.so": b"left out",
    "pack/sm100/ops.py": b"left out",
    "pack/data/tests/test_it.py": b"left out",
    "pack-1.0.data/scripts/tool": b"left out",
    "pack-1.0.data/purelib/pure/__init__.py": b"moved",
    "pack-1.0.data/platlib/plat.py": b"moved too",
    "pack-1.0.dist-info/METADATA": b"Name: pack\nVersion: 1.0",
    "pack.pth": b"import nothing\nparts/python\nparts/gone\n",
    "parts/python/part.py": b"",
    PROGRAM: b"#!/bin/sh",
}
METADATA = "pack-1.0.dist-info/METADATA"
RELEASED = {f"specgate-wheels/{version}/backend.py" for version in WHEELS}
INSTALLED = RELEASED | {
    "pack/__init__.py",
    "pack/data/kernel.cu",
    "pure/__init__.py",
    "plat.py",
    "pack.pth",
    "parts/python/part.py",
    PROGRAM,
    METADATA,
}


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel, which is all that any download brings."""
    path = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in WHEEL.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name == PROGRAM else 0o644) << 16
            archive.writestr(info, content)
    spec = bundle.specification() | {"left_out": {"patterns": LEFT_OUT, "of_releases": []}}
    monkeypatch.setattr(bundle, "specification", lambda: spec)
    monkeypatch.setattr(bundle, "download", lambda *_: [path])
    monkeypatch.setattr(bundle, "fetch_release", fetched)
    return path


def fetched(release: Wheel, into: Path) -> None:
    """A release whose only file says which one it is."""
    (into / release.version).mkdir(parents=True)
    (into / release.version / "backend.py").write_text(release.version)


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)) for path in found}


def test_bundle_comes_out_as_it_went_in(wheel: Path, tmp_path: Path) -> None:
    parts = bundle.build(tmp_path / "out", 60)
    assert len(parts) > 10, "part 10 comes after part 9, and by name before part 2"
    assert [part.parent.name for part in parts] == [f"part-{i}" for i in range(len(parts))]
    assert all(part.stat().st_size <= 60 for part in parts)
    site = run.unpack(tmp_path / "out", tmp_path / "cache")
    assert files(site) == INSTALLED
    assert (site / "pack/data/kernel.cu").read_bytes() == WHEEL["pack/data/kernel.cu"]
    assert (site / "pure/__init__.py").read_bytes() == b"moved"
    programs = [path for path in site.rglob("*") if path.is_file() and os.access(path, os.X_OK)]
    said = "a program that a wheel marks executable, and no other file, is so when unpacked"
    assert programs == [site / PROGRAM], said
    assert (site / "specgate-wheels/0.5.14/backend.py").read_text() == "0.5.14"


def test_a_release_has_an_interpreter_that_finds_it_first(wheel: Path, tmp_path: Path) -> None:
    older = tmp_path / "older.whl"
    with zipfile.ZipFile(older, "w") as archive:
        archive.writestr("pack/__init__.py", b"version = 0")
    served = bundle.specification() | {"releases": {"0.5.13": {"pack": "0"}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "specification", lambda: served)
        patch.setattr(bundle, "download", lambda of, *_: [older if of == {"pack": "0"} else wheel])
        bundle.build(tmp_path / "out", 1 << 20, ["nightly"])
    cache = tmp_path / "a 'cache'"
    site = run.unpack(tmp_path / "out", cache)
    run.write_pythons(site, cache)
    code = "import pack, plat; print(pack.version)"
    (site / "plat.py").write_text("")
    for path, told in ((str(site), "0\n"), ("", "")):  # alone it has nothing but the release
        done = subprocess.run(
            [cache / "python-0.5.13", "-P", "-c", code], env={"PYTHONPATH": path}, check=False,
            capture_output=True, text=True, cwd=site,
        )  # fmt: skip
        assert (done.stdout, "'plat'" in done.stderr) == (told, not told)


def test_an_interpreter_of_a_release_is_this_one_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "one's own" / "python"
    own.parent.mkdir()
    own.symlink_to(sys.executable)
    (tmp_path / run.PYTHONS_FOLDER / "0.5.13").mkdir(parents=True)
    monkeypatch.setattr(run.sys, "executable", str(own))
    run.write_pythons(tmp_path, tmp_path)
    asked = [tmp_path / "python-0.5.13", "-c", "print(7)"]
    done = subprocess.run(asked, check=False, capture_output=True, text=True)
    told = f"a release starts under {own}: {done.stderr}"
    assert (done.returncode, done.stdout) == (0, "7\n"), told


def test_same_packages_give_the_same_bundle_and_replace_it(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = [part.name for part in bundle.build(out, 100)]
    os.utime(wheel, (0, 0))
    assert [part.name for part in bundle.build(out, 100)] == first
    assert len(bundle.build(out, 60)) > 10, "part-10 is of two digits"
    assert len(bundle.build(out, 1 << 20)) == 1
    assert len(files(out)) == 1


def test_bundle_is_unpacked_once(wheel: Path, tmp_path: Path) -> None:
    bundle.build(tmp_path / "out", 1 << 20)
    site = run.unpack(tmp_path / "out", tmp_path / "cache")
    (site / "mark").touch()
    assert run.unpack(tmp_path / "out", tmp_path / "cache") == site
    assert (site / "mark").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [site.name]


def test_packages_are_compiled_once_for_all_that_import_them(wheel: Path, tmp_path: Path) -> None:
    bundle.build(tmp_path / "out", 1 << 20)
    site = run.unpack(tmp_path / "out", tmp_path / "cache")
    assert Path(cache_from_source(str(site / "pure/__init__.py"))).is_file()


def test_of_two_that_unpack_at_once_the_first_is_kept(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.build(tmp_path / "out", 1 << 20)
    rename = Path.rename

    def second(path: Path, target: Path) -> Path:
        target.mkdir()
        (target / "mark").touch()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second)
    site = run.unpack(tmp_path / "out", tmp_path / "cache")
    assert files(site) == {"mark"}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [site.name]


def lose(parts: list[Path]) -> None:
    parts[1].unlink()


def mix(parts: list[Path]) -> None:
    parts[0].with_name("0" * 64 + ".0-of-1").touch()


def damage(parts: list[Path]) -> None:
    parts[1].write_bytes(b"?" + parts[1].read_bytes()[1:])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lose, r"all parts, \w+\.1-of-\d+ among them"),
        (mix, "a folder of one bundle, it has 2"),
        (damage, "parts as they were built: carry it again"),
    ],
)
def test_incomplete_bundle_is_refused(
    wheel: Path, tmp_path: Path, harm: Callable[[list[Path]], None], told: str
) -> None:
    harm(bundle.build(tmp_path / "out", 100))
    with pytest.raises(UsageError, match=f"bundle = .*/out' is not accepted; accepted: {told}"):
        run.unpack(tmp_path / "out", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))
    with pytest.raises(UsageError, match="a folder of one bundle, it has 0"):
        run.unpack(tmp_path / "none", tmp_path / "cache")


class Child:
    """Stands in for processes: remembers what was started."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.commands: list[list[str]] = []
        self.environment: Mapping[str, str] = {}
        self.on_path: list[Path] = []
        self.metadata: list[str] = []

    def __call__(self, command: list[str], environment: Mapping[str, str]) -> int:
        self.commands.append(command)
        self.environment = environment
        paths = environment["PYTHONPATH"].split(os.pathsep)
        self.on_path = [Path(path) for path in paths]
        self.metadata = [one.name for one in self.on_path[1].iterdir()]
        return self.code


@pytest.fixture
def child(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """The lane, which ends with 3, on a bundle made for this machine."""
    bundle.build(tmp_path / "out", 100)
    this_machine(monkeypatch)
    monkeypatch.setattr(checkout_metadata, "write", lambda into, site: (into / site.name).touch())
    made = Child(3)
    monkeypatch.setattr(run, "carried_out", made)
    monkeypatch.setenv("SPECGATE_CACHE", str(tmp_path / "cache"))
    for name in ("FLASHINFER_WORKSPACE_BASE", "SPECGATE_WHEELS"):
        monkeypatch.delenv(name, raising=False)
    return made


def this_machine(monkeypatch: pytest.MonkeyPatch, torch: str = "2.11.0+cu130") -> None:
    monkeypatch.setattr(run, "version", lambda _: torch)
    python = "{}.{}".format(*sys.version_info)
    spec = run.specification() | {"machine": {"python": python, "torch": "2.11.0"}}
    monkeypatch.setattr(run, "specification", lambda: spec)


@pytest.mark.parametrize(
    ("lane", "args"),
    [
        pytest.param((), ("-k", "xqa"), id="gpu"),
        pytest.param(("--lane", "nightly"), ("--unpinned", "--", "--seed", "9"), id="nightly"),
        pytest.param(("--lane", "server"), ("--server", "sglang"), id="server"),
    ],
)
def test_lane_is_tox_s_and_finds_the_packages(
    child: Child,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lane: tuple[str, ...],
    args: tuple[str, ...],
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert cli.main(["run", str(tmp_path / "out"), *lane, *args]) == 3
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    name = lane[-1] if lane else "gpu"
    [line] = re.findall(
        rf"^\[testenv:{name}\]\n(?:.+\n)*commands = python (.+) \{{posargs\}}", tox, re.M
    )
    assert child.commands == [[sys.executable, *line.split(), *args]]
    environment = child.environment
    site, _, *rest = child.on_path
    assert files(site) == INSTALLED
    assert child.metadata == [site.name]
    assert rest == [ROOT, site / "parts/python", Path("elsewhere")]
    assert environment["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "cache" / "jit")
    assert environment["SPECGATE_WHEELS"] == f"{site}/specgate-wheels"
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_an_interrupted_lane_is_one_line(
    child: Child,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "carried_out", interrupted)
    assert cli.main(["run", str(tmp_path / "out")]) == INTERRUPTED
    assert capsys.readouterr().err == "offline: interrupted\n"


def test_compiled_kernels_and_releases_may_lie_elsewhere(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "warm"))
    monkeypatch.setenv("SPECGATE_WHEELS", "/releases")
    assert run.run(tmp_path / "out", "gpu", []) == 3
    assert child.environment["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "warm")
    assert (tmp_path / "warm").is_dir(), "the folder that the lane compiles in is there"
    assert child.environment["SPECGATE_WHEELS"] == "/releases"


def test_other_machine_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    this_machine(monkeypatch, torch="2.12.0+cu130")
    assert cli.main(["run", str(tmp_path)]) == 2
    told = "offline: torch = '2.12.0' is not accepted; accepted: 2.11.0\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(run.sys, "version_info", (3, 10, 1))
    assert cli.main(["run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("offline: python = '3.10' is not accepted")


def test_metadata_is_found_as_that_of_an_editable_install(tmp_path: Path) -> None:
    checkout_metadata.write(tmp_path, tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [written] = tmp_path.iterdir()
    assert written.name == f"specgate-{project['version']}.dist-info"
    [found] = distributions(name="specgate", path=[str(tmp_path)])
    assert found.version == project["version"]
    scripts = {
        entry.name: entry.value for entry in found.entry_points.select(group="console_scripts")
    }
    assert scripts == project["scripts"]
    groups = {"console_scripts", *project["entry-points"]}
    assert found.entry_points.groups == groups


def test_metadata_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text("raise ImportError('too old')")
    told = "setuptools cannot write the project's metadata: ImportError: too old"
    with pytest.raises(UsageError, match=f"^{told}$"):
        checkout_metadata.write(tmp_path, tmp_path)


def test_script_starts_the_lane_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / "ci" / "offline" / "run"
    assert os.access(script, os.X_OK)
    bash = shutil.which("bash")
    assert bash is not None
    environment = os.environ | {"PYTHON": "echo"}
    told = subprocess.run(
        [bash, str(script), "some bundle", "-k", "a b"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"-m ci.offline run {tmp_path}/some bundle -k a b\n"
