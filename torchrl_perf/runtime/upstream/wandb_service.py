"""W&B's service process: ended, and forgotten, so that a dead one cannot stop or slow the run.

W&B starts one for each process and keeps it in a module's global; ``wandb.teardown`` waits for its answer.
"""

import contextlib
import os
import subprocess
import sys


def forget_import_hooks(run_id: str) -> None:
    """Take back W&B's hooks on imports of well-known packages, which only count who uses them.

    They ask the service, in the thread that imports: with a dead service every such import of the process would raise
    ``ConnectionResetError``, and with a hanging one it would wait.
    """
    from wandb.sdk.wandb_run import Run

    with contextlib.suppress(AttributeError):  # a release without these hooks
        Run._unregister_telemetry_import_hooks(run_id)


def forget_service(*, kill: bool) -> bool:
    """Whether W&B's service is gone; then its exit hook is gone too, and the next run starts a new service."""
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    connection = getattr(getattr(setup, "_singleton", None), "_connection", None)
    if setup is None or connection is None or connection._proc is None:
        return False  # a service that another process has started is not ours to end
    process = connection._proc._process
    if kill:
        process.kill()
    try:
        process.wait(timeout=1.0)  # its socket may close a moment before it ends
    except subprocess.TimeoutExpired:
        return False
    connection._cleanup()
    os.environ.pop("WANDB_SERVICE", None)
    setattr(setup, "_singleton", None)  # noqa: B010
    return True
