"""A library keeps the device code of one GPU, and every byte that is not device code."""

from __future__ import annotations

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


@pytest.mark.parametrize("end", [1, 15, 16, 17, 79, 80, len(MINE) - 1])
def test_what_is_cut_off_or_does_not_add_up_is_left_alone(end: int, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(MINE[:end])
    assert device_code.keep(library, 90) == 0
    longer = MINE[:16] + MINE[16:].replace((40).to_bytes(8, "little"), (41).to_bytes(8, "little"))
    library.write_bytes(longer)
    assert device_code.keep(library, 90) == 0
    assert library.read_bytes() == longer


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
    bundle.strip(tmp_path, 90, {})
    assert b"b" * 72 not in large.read_bytes()
    assert b"h" * 56 in large.read_bytes()
    assert small.read_bytes() == MINE
    assert asked == [["/bin/strip", "--strip-unneeded", str(large)]]
    assert bundle.specification()["machine"]["architecture"] == 90
