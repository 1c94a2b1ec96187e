"""A trader that learns on windows of past prices and trades the next ones: what all tests together brought."""

from typing import Any

__all__ = ["TEST_BARS", "TRAIN_BARS", "walked"]

TRAIN_BARS, TEST_BARS = 2_520, 1_008
"""Ten years of trading days to learn from, four to trade."""
BARS_PER_YEAR = 252


def walked(config: Any) -> dict[str, Any]:
    """Walks forward over all prices that a config names; nothing of a test is learnt from before it is traded.

    Returns:
        ``steps`` of learning in all windows; by column ``curves`` of "step", bars that were traded, and "value": the
        log growth so far, costs paid, of the trader (``growth``) and of buying and holding (``hold``);
        ``evaluation``: of ``trained`` the log growth of all tests (``growth``), that of a year, what was paid of the
        capital, the mean weight and its absolute value, the number of ``tests`` and of those that were ``won`` against
        both holding and doing nothing; of ``hold`` the same growth, and of each test by its last date both growths.

    Raises:
        ImportError: for the S&P 500 without the package ``skfolio``.
        RuntimeError: for a run that diverged.
    """
    from torchrl_perf.systems.options_market.evaluation import walk_forward

    folds = walk_forward(config, train_bars=TRAIN_BARS, test_bars=TEST_BARS, windows=False)
    traded, found = [fold.after for fold in folds], {}
    steps = [TEST_BARS * number for number in range(len(folds) + 1)]
    curves = {
        "growth": {"step": steps, "value": _sums([one.growth for one in traded])},
        "hold": {"step": steps, "value": _sums([one.buy_and_hold for one in traded])},
    }
    years = TEST_BARS * len(folds) / BARS_PER_YEAR
    for who, curve in (("trained", curves["growth"]), ("hold", curves["hold"])):
        total = curve["value"][-1]
        found[who] = {"growth": total, "growth_a_year": total / years}
    found["trained"] |= {
        "costs": sum(one.costs for one in traded),
        "weight": sum(one.weight for one in traded) / len(folds),
        "exposure": sum(one.exposure for one in traded) / len(folds),
        "tests": float(len(folds)),
        "won": float(sum(one.growth > max(one.buy_and_hold, 0.0) for one in traded)),
    }
    for fold in folds:
        found[f"to {fold.tested_on[1]}"] = {"growth": fold.after.growth, "held": fold.after.buy_and_hold}
    return {"steps": len(folds) * config.total_steps, "curves": curves, "evaluation": found}


def _sums(values: list[float]) -> list[float]:
    """0 and the sums so far."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
