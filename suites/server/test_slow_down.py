"""An injected slowdown delays every step while it lasts, and none after it."""

from __future__ import annotations

from itertools import pairwise

from fixtures.drivers.crowd import settled, text

# Half of it is more than the steps' own work, which must not pass for a sleep that is left out,
# and more than a busy host hands the first chunk on late, which shortens what follows.
SLEEP_S, NEW = 0.4, 12


def test_every_step_sleeps(server):
    server.client.slow_down(SLEEP_S)
    first, *others = (chunk.at for chunk in server.client.stream(text(70, 9), NEW))
    server.client.slow_down(None)
    assert others
    assert all(at - first > (steps - 0.5) * SLEEP_S for steps, at in enumerate(others, 1))
    again = [chunk.at for chunk in server.client.stream(text(71, 9), NEW)]
    quickest = min(after - before for before, after in pairwise(again))
    assert quickest < 0.8 * SLEEP_S, "/slow_down with forward_sleep_time = null ends the sleeps"
    settled(server)
