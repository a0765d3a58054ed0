"""An injected slowdown delays every step while it lasts, and none after it."""

from __future__ import annotations

from itertools import pairwise

from fixtures.drivers.crowd import settled, text

SLEEP_S, NEW = 0.05, 12


def test_every_step_sleeps(server):
    server.client.slow_down(SLEEP_S)
    chunks = [chunk.at for chunk in server.client.stream(text(70, 9), NEW)]
    server.client.slow_down(None)
    gaps = [after - before for before, after in pairwise(chunks)]
    assert min(gaps) > 0.8 * SLEEP_S
    again = [chunk.at for chunk in server.client.stream(text(71, 9), NEW)]
    quick = sorted(after - before for before, after in pairwise(again))
    assert quick[0] < 0.8 * SLEEP_S
    settled(server)
