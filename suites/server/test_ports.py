"""A port is given once, is free and is not ephemeral."""

from __future__ import annotations

import socket
from itertools import chain, repeat
from pathlib import Path

import pytest

from harness.server.launch import ports
from harness.server.launch.ports import free_port


@pytest.fixture(params=["32768\t60999", "1024 65535", None], ids=["Linux", "all", "another"])
def first_ephemeral(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """First ephemeral port; 0 where none is below it, or where the system has no such range."""
    path = tmp_path / "range"
    if request.param:
        path.write_text(request.param, encoding="ascii")
    monkeypatch.setattr(ports, "EPHEMERAL", path)
    return 32768 if request.param == "32768\t60999" else 0


def test_ports_are_given_once_and_lie_below_those_of_connections(first_ephemeral: int) -> None:
    given = [free_port() for _ in range(500)]
    assert len(set(given)) == 500, "a port is given once"
    bound = first_ephemeral or 65536
    told = f"a port lies between 1024 and the first ephemeral one, {bound}: {max(given)} was given"
    assert all(1024 <= port < bound for port in given), told


def test_a_port_that_is_listened_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        draws = chain([taken, taken], repeat(0))
        monkeypatch.setattr(ports, "_draw", lambda: next(draws))
        assert free_port() != taken
