"""A library keeps the device code of one GPU, and every byte that is not device code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.offline import bundle, device_code

MAGIC = bytes.fromhex("50ed55ba")
PTX, CUBIN = 1, 2


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """As ``fatbinary`` writes it: a header of 64 bytes, then what a driver loads."""
    words = kind.to_bytes(2, "little") + b"\x01\x01" + (64).to_bytes(4, "little")
    words += len(payload).to_bytes(8, "little") + b"\xaa" * 12 + architecture.to_bytes(4, "little")
    return words.ljust(64, b"\xbb") + payload


def fat_binary(*entries: bytes) -> bytes:
    size = len(b"".join(entries)).to_bytes(8, "little")
    return MAGIC + b"\x01\x00\x10\x00" + size + b"".join(entries)


MINE = fat_binary(
    entry(PTX, 90, b"p" * 24), entry(CUBIN, 80, b"a" * 40), entry(CUBIN, 90, b"h" * 56),
    entry(CUBIN, 90, b"i" * 8), entry(CUBIN, 100, b"b" * 72),
)  # fmt: skip
OTHERS = fat_binary(entry(CUBIN, 80, b"c" * 16), entry(PTX, 80, b"q" * 32))
HOST = b"host code" + MAGIC + b"\x07 is no header " + MAGIC


def test_only_code_that_another_gpu_would_load_becomes_zeros(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(HOST + MINE + HOST + OTHERS + MINE)
    assert device_code.keep(library, 90) == 2 * (24 + 40 + 72)
    mine = MINE
    for byte, size in ((b"p", 24), (b"a", 40), (b"b", 72)):
        mine = mine.replace(byte * size, bytes(size))
    # The driver compiles the PTX of a library that has nothing for this GPU.
    assert library.read_bytes() == HOST + mine + HOST + OTHERS + mine
    assert device_code.keep(tmp_path / "lib.so", 75) == 0
    library.write_bytes(fat_binary(entry(CUBIN, 80, b"a" * 40), entry(PTX, 90, b"p" * 24)))
    told = "of this GPU's architecture there is PTX alone, which a driver compiles for it"
    assert device_code.keep(library, 90) == 0, told


@pytest.mark.parametrize("end", [1, 15, 16, 17, 79, 80, len(MINE) - 1])
def test_what_is_cut_off_or_does_not_add_up_is_left_alone(end: int, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(MINE[:end])
    assert device_code.keep(library, 90) == 0
    longer = MINE[:16] + MINE[16:].replace((40).to_bytes(8, "little"), (41).to_bytes(8, "little"))
    library.write_bytes(longer)
    assert device_code.keep(library, 90) == 0
    assert library.read_bytes() == longer


NAMES = [
    b"_Z7forwardILi128ENS_10bfloat16_tEv", b"_Z7forwardILi128ENS_6half_tEv", b"_Z7combinev",
]  # fmt: skip


def cubin(*kernels: bytes) -> bytes:
    """With the sections that tell what its kernels are."""
    return b"\x7fELF" + b"".join(b"\0.text.%s\0.nv.info.%s" % (name, name) for name in kernels)


def packed(code: bytes) -> bytes:
    """As ``nvcc`` compresses it, filled up with zeros."""
    words = ["zstd", "--quiet", "--stdout"]
    done = subprocess.run(words, input=code, capture_output=True, check=True).stdout
    return done + bytes(-len(done) % 8 + 8)


@pytest.mark.parametrize("form", [bytes, packed], ids=["plain", "packed"])
def test_of_this_gpu_the_code_of_some_kernels_stays(
    form: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    if form is packed and not shutil.which("zstd"):
        pytest.skip("zstd, which reads packed code, is not installed")
    library = tmp_path / "lib.so"
    cubins = [form(cubin(name)) for name in NAMES]
    both = form(cubin(*NAMES[:2]))
    written = [fat_binary(entry(CUBIN, 90, code)) for code in (*cubins, both)]
    library.write_bytes(HOST.join(written))
    assert device_code.keep(library, 90, "10bfloat16_t|combine") == len(cubins[1])
    written[1] = written[1].replace(cubins[1], bytes(len(cubins[1])))
    assert library.read_bytes() == HOST.join(written)


def test_code_whose_kernels_nobody_can_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_code.shutil, "which", lambda _: None)
    library = tmp_path / "lib.so"
    library.write_bytes(fat_binary(entry(CUBIN, 90, b"\x28\xb5\x2f\xfd" + b"?" * 20)))
    assert device_code.keep(library, 90, "combine") == 0


def test_the_patterns_of_the_bundle_are_of_libraries_that_it_has() -> None:
    [(library, pattern)] = bundle.specification()["kernels"].items()
    assert library == "flash_ops.abi3.so"
    kept = "_ZN5flash12FwdSm90ILi128ENS_10bfloat16_tEfNS_4arch4Sm90ELb1ELb0ELb{}ELb1EEE"
    assert re.search(pattern, kept.format(0))
    assert not re.search(pattern, kept.format(1))
    assert not re.search(pattern, kept.format(0).replace("10bfloat16_t", "6half_t"))
    assert not re.search(pattern, kept.format(0).replace("Li128", "Li256"))
    # Later patterns would leave out what is taken along here.
    assert not any(library in pattern for pattern in bundle.specification()["left_out"]["patterns"])


def test_large_libraries_of_a_bundle_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(bundle.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(bundle.subprocess, "run", lambda words, **_: asked.append(words))
    large, small = tmp_path / "a" / "liblarge.so.2", tmp_path / "small.so"
    large.parent.mkdir()
    large.write_bytes(MINE.ljust(bundle.STRIPPED_FROM, b"."))
    small.write_bytes(MINE)
    bundle.strip(tmp_path, 90, {"liblarge.so": "other library", "liblarge.so.2": ""})
    assert b"b" * 72 not in large.read_bytes()
    assert b"h" * 56 in large.read_bytes()
    assert small.read_bytes() == MINE
    assert asked == [["/bin/strip", "--strip-unneeded", str(large)]]
    assert bundle.specification()["machine"]["architecture"] == 90
