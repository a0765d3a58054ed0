"""Archives of ours, unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract(archive: tarfile.TarFile, into: Path) -> None:
    """All of an archive that we or git wrote, through the data filter where Python has one."""
    if hasattr(tarfile, "data_filter"):  # since 3.11.4
        archive.extraction_filter = tarfile.data_filter
    archive.extractall(into)
