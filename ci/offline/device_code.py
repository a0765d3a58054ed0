"""Device code for other GPUs leaves libraries: zeros take its place, which pack to nothing.

A library's fat binaries have a header (magic, version, its size, the size of what follows) and
entries; each entry has a header (kind, version, its size, its payload's size, …, architecture) and
a payload. No offset moves, and a driver loads the entry of its own GPU alone, when a kernel of it
is first asked for: of a library that has kernels for every model, those of some can be kept.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ12xI")
CUBIN = 2
ZSTD = struct.pack("<I", 0xFD2FB528)
KERNEL = re.compile(rb"\.nv\.info\.(\w+)")
"""A section of a cubin, named after its kernel."""
Payload = tuple[int, int, int, int]
"""Kind, architecture, offset and size."""


def keep(library: Path, architecture: int, kernels: str = "") -> int:
    """Zero what another GPU would load, wherever there is code for this one.

    Args:
        library: a file, written again where something was left out.
        architecture: such as 90, whose fat binaries keep what was compiled for it.
        kernels: a pattern; code for this GPU whose kernels have other names is zeroed, too.

    Returns:
        Bytes that were zeroed.
    """
    data, zeroed = bytearray(library.read_bytes()), 0
    for payloads in list(_fat_binaries(data)):
        if not any(one[:2] == (CUBIN, architecture) for one in payloads):
            continue  # a driver compiles another one's PTX
        for kind, of, offset, size in payloads:
            code = bytes(data[offset : offset + size])
            if (kind, of) != (CUBIN, architecture) or (kernels and not _has_kernel(code, kernels)):
                data[offset : offset + size] = bytes(size)
                zeroed += size
    if zeroed:
        library.write_bytes(data)
    return zeroed


def _has_kernel(code: bytes, pattern: str) -> bool:
    """Whether a kernel's name has the pattern; True where nobody can read the names."""
    if code.startswith(ZSTD) and (tool := shutil.which("zstd")):
        # It ends with 1 at the zeros that fill up the payload.
        words = [tool, "--decompress", "--stdout", "--quiet"]
        code = subprocess.run(words, input=code, capture_output=True, check=False).stdout
    names = KERNEL.findall(code)
    return not names or any(re.search(pattern.encode(), name) for name in names)


def _fat_binaries(data: bytearray) -> Iterator[list[Payload]]:
    start = data.find(MAGIC)
    while start >= 0:
        payloads = _payloads(data, start)
        if payloads:
            yield payloads
        start = data.find(MAGIC, start + len(MAGIC))


def _payloads(data: bytearray, start: int) -> list[Payload]:
    """Of the fat binary at an offset; none where its sizes do not add up."""
    if start + HEADER.size > len(data):
        return []
    _, version, header, size = HEADER.unpack_from(data, start)
    offset, end = start + header, start + header + size
    if (version, header) != (1, HEADER.size) or end > len(data):
        return []
    found: list[Payload] = []
    while offset + ENTRY.size <= end:
        kind, _, own, payload, architecture = ENTRY.unpack_from(data, offset)
        if own < ENTRY.size or offset + own + payload > end:
            return []
        found.append((kind, architecture, offset + own, payload))
        offset += own + payload
    return found if offset == end else []
