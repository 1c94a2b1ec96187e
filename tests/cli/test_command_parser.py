"""Arguments that a command cannot understand: one sentence with a remedy, exit code 2."""

import pytest

from torchrl_perf.cli import main


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evaluate"], "evaluate: expected RUN, received nothing. Remedy: torchrl-perf evaluate RUN\n"),
        (["compare", "--out", "a.png"], "compare: expected RUN, received nothing. Remedy: torchrl-perf compare RUN\n"),
        (
            ["evaluate", "a", "--episodes", "many"],
            "--episodes: expected an integer, received 'many'. Remedy: --episodes",
        ),
        (["evaluate", "a", "--episodes"], "--episodes: expected a value, received none. Remedy: --episodes followed"),
        (["evaluate", "a", "--episode", "3"], "--episode: expected an option of the command, received an unknown word"),
        (["evaluate", "a", "--episode", "3"], "Remedy: --episodes, the nearest.\n"),
        (["play", "a", "b"], "b: expected an option of the command, received an unknown word. Remedy: leave it out.\n"),
        (["export", "a", "--checkpoint", "last"], "--checkpoint: expected one of"),
        (
            ["zoo", "--long"],
            "--long: expected an option of the command, received an unknown word. Remedy: leave it out.\n",
        ),
        (["doctor", "--fast"], "--fast: expected an option of the command"),
        (["syncs"], "syncs: expected a SCRIPT or -m MODULE, received neither. Remedy: name one\n"),
        (
            ["train", "ppo", "--num-envs", "many"],
            "--num-envs: expected an integer, received 'many' (str). Remedy: --num",
        ),
    ],
)
def test_one_sentence_and_the_way_to_all_options(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    name = " ".join(argv[: 2 if argv[0] == "train" else 1])
    assert error.splitlines()[-1] == f"Every option: torchrl-perf {name} --help"
    assert "usage:" not in error
