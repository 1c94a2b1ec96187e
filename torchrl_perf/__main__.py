"""``python -m torchrl_perf`` is ``torchrl-perf``."""

import sys

from torchrl_perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
