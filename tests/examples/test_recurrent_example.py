"""The recurrent example: an iteration of its loop runs, and the whole of it balances a pole that it half sees."""

import pytest
from test_examples import load


def test_prints_its_last_line(capsys):
    mean_return = load("recurrent_ppo").main(iterations=2, num_envs=8, num_steps=16)
    assert capsys.readouterr().out == f"mean return of the last 100 episodes: {mean_return:.1f}\n"


@pytest.mark.slow
def test_balances_without_seeing_velocities():
    # without a memory such runs end at 47; this one at 500, and with seed 2 at 499
    assert load("recurrent_ppo").main() > 400
