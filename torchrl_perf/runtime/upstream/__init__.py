"""What TorchRL, tensordict, torch, VMAS and W&B give no public way to: one file a case, which says why.

The rest of the package uses public names, and imports these files one by one, since some need what others do without.
``tests/runtime/test_upstream.py`` holds each against the version that is installed.
"""

__all__: list[str] = []
