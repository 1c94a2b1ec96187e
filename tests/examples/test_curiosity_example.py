"""The example of curiosity: with it the car reaches the flag, without it never."""

import pytest
from test_examples import load


def test_chance_does_not_reach_the_flag(capsys):
    assert load("curiosity").main(iterations=2, curiosity=0.0) == (0, -200.0)
    assert capsys.readouterr().out.startswith("flag reached 0 times, mean return -200.0, mean surprise ")


@pytest.mark.slow
def test_curiosity_reaches_the_flag():
    reached, mean_return = load("curiosity").main()
    assert reached > 100
    assert mean_return > -185
