"""``--backend``: what steps a task of MuJoCo."""

import pytest

from torchrl_perf.cli.backend import named_by_backend


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--env HalfCheetah --backend warp", "--env HalfCheetah"),
        ("--env HalfCheetah-v5 --backend warp", "--env HalfCheetah"),
        ("--backend gym --env HalfCheetah --seed 3", "--seed 3 --env HalfCheetah-v5"),
        ("--env=Ant --backend=gym", "--env Ant-v5"),
        ("--env CartPole --seed 3", "--env CartPole --seed 3"),
    ],
)
def test_a_backend_names_the_env(given, wanted):
    assert named_by_backend(given.split()) == wanted.split()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--env Ant --backend mjx", r"expected one of warp, gym, received 'mjx'. Remedy: warp"),
        ("--env CartPole --backend warp", r"expected a task of MuJoCo, .* received --env CartPole. Remedy: leave"),
        ("--env HalfCheeta --backend gym", r"received --env HalfCheeta. Remedy: --env HalfCheetah, the nearest"),
        ("--backend gym", r"expected a task of MuJoCo"),
    ],
)
def test_what_has_no_backend_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        named_by_backend(given.split())
