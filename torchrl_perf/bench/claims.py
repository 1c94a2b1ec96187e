"""``torchrl-perf bench claims``: the studies of a checkout, which are not part of the installed package."""

import importlib
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Runs ``studies.claims`` of the checkout that this package lies in.

    Returns:
        Its exit code; 2 where there is no checkout around the package.
    """
    if not (CHECKOUT / "studies" / "claims.py").is_file():
        print(
            f"bench claims: expected the folder studies/ beside the package, received none in {CHECKOUT}. Remedy: the "
            "studies are not part of the wheel; clone the repository, `pip install -e .` there and run it again.",
            file=sys.stderr,
        )
        return 2
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("studies.claims").main(argv)
