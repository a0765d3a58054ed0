"""What becomes of a batch that got no answer, or whose process ended in the middle of it."""

from __future__ import annotations

from collections import Counter

from ci.cluster.batches import Batch, apart

KILLS = 3
"""So often a unit may end its process before it is red for that."""
NODES_LOST_TOGETHER = 3
"""A batch that was lost with so many nodes is run unit by unit: one of them may be the reason."""
NODES_LOST_ALONE = 10
"""A unit that was alone on so many nodes that were lost is red for that."""


class Losses:
    """Counts losses, and says what is run again and what is red."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        self._lost_nodes: Counter[tuple[str, ...]] = Counter()
        self.batches = 0

    def killed(self, unit: str, reason: str) -> str:
        """Count a process that a unit ended; why the unit is red, empty where it runs again."""
        self.kills[unit] += 1
        if self.kills[unit] < KILLS:
            return ""
        return f"killed its worker {KILLS} times: {reason}"

    def lost_worker(self, batch: Batch, reason: str) -> tuple[list[Batch], str]:
        """What runs again, and why a batch of one unit is red, empty where it is not.

        Nobody knows which unit of several it was: each gets a process of its own.
        """
        self.batches += 1
        if len(batch.units) > 1:
            return apart(batch), ""
        red = self.killed(batch.units[0], reason)
        return ([] if red else [batch]), red

    def lost_node(self, batch: Batch, reason: str) -> tuple[list[Batch], str]:
        """As above, for a batch whose node is gone, of which it is most likely innocent."""
        self.batches += 1
        self._lost_nodes[batch.units] += 1
        times = self._lost_nodes[batch.units]
        if len(batch.units) > 1:
            return (apart(batch) if times >= NODES_LOST_TOGETHER else [batch]), ""
        if times < NODES_LOST_ALONE:
            return [batch], ""
        return [], f"lost with its node {times} times: {reason}"
