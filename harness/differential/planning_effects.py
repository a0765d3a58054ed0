"""What planning costs the host: its reads of the device, its operations, its launches."""

from __future__ import annotations

from harness.core.case import Case, Execution
from harness.differential.forward import decoys
from harness.differential.inputs import make_trial_inputs
from harness.differential.pool_state import make_pool_state
from harness.differential.rig import build
from harness.graphs.effects import Effects
from harness.subjects import Subject


def planning_effects(subject: Subject, case: Case, execution: Execution) -> Effects:
    """Effects of planning one batch: eagerly, or before the replay of a graph.

    Reads of lengths that the host was given, and of what follows from them, are no reads of the
    device.

    Raises:
        NotImplementedError: the subject's backend does not tell of its planning.
    """
    case = subject.adapted(case)
    more = decoys(case) if execution is Execution.GRAPH else ()
    inputs = make_trial_inputs(case, *more)
    rig = build(subject, make_pool_state(inputs))
    if execution is Execution.EAGER:
        rig.backend.init_forward_metadata(rig.batch)
    else:
        runner = rig.capture(tuple(decoy.bs for decoy in more))
        runner.prepare(rig.batch)
    effects: Effects | None = getattr(rig.backend, "planning", None)
    if effects is None:
        raise NotImplementedError(f"{type(rig.backend).__name__} does not tell of its planning")
    return effects
