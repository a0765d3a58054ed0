"""Read by tox: without a GPU a lane that needs one ends before its packages are installed."""

from __future__ import annotations

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Fail

from ci.__main__ import lacks_gpu


@impl
def tox_on_install(tox_env: ToxEnv) -> None:
    """Refuse the lane.

    Raises:
        Fail: it needs a GPU and there is none.
    """
    if reason := lacks_gpu(tox_env.conf.name):
        raise Fail(reason)
