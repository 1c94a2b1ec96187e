"""The documentation's tables of agents, tasks and systems: their rows for a registry, and their refusals."""

import pytest
from torchrl.data import Unbounded

from torchrl_perf.bench import readme_agents
from torchrl_perf.registry import ALGORITHMS, SYSTEMS, Entry


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_every_registered_algorithm_has_a_row_with_its_actions_and_presets():
    header, _, *rows = cells(readme_agents.agents_table())
    assert [row[0] for row in rows] == [f"`{name}`" for name in ALGORITHMS]
    by_name = {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}
    assert by_name["ppo"]["actions"] == "index, or box"
    assert by_name["hybrid-ppo"]["actions"] == "index and box"
    assert by_name["td3"]["papers"] == "[1802.09477](https://arxiv.org/abs/1802.09477)"
    assert by_name["td3"]["learns by"] == "TD3: DDPG with several critics, a slower actor and smoothed targets"
    for name, entry in ALGORITHMS.items():
        assert by_name[name]["`--env` with a preset"].split(", ") == list(entry.load("presets"))


def test_a_line_in_the_registry_is_a_row():
    table = readme_agents.agents_table({"mine": Entry(*ALGORITHMS["sac"])})
    assert [row[0] for row in cells(table)[2:]] == ["`mine`"]


def test_tasks_say_sizes_steps_and_who_has_presets():
    header, _, *rows = cells(readme_agents.tasks_table(("CartPole", "HybridTarget")))
    assert header[2:] == ["observation", "action", "steps", "presets of"]
    learners = [name for name, entry in ALGORITHMS.items() if "CartPole" in entry.load("presets")]
    assert rows[0][2:] == ["4", "index of 2", "500", ", ".join(learners)]
    assert rows[1][2:5] == ["2", "index of 2 and box of 2", "8"]


def test_marine_agents_share_a_row():
    names = [row[0] for row in cells(readme_agents.systems_table())[2:]]
    assert len(names) == len({name.partition("-")[0] if name.startswith("marine-") else name for name in SYSTEMS})
    assert sum(name.startswith("`marine --agent`") for name in names) == 1


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Every choice of a DQN run (arXiv:1312.5602), with n-step returns", "DQN, with n-step returns"),
        ("Every choice of a run of quantile regression DQN (arXiv:1710.10044)", "quantile regression DQN"),
        ("Every choice of an AC-IQN run: a policy", "AC-IQN: a policy"),
        ("Settings of prune and graft", "Settings of prune and graft"),
    ],
)
def test_words_of_a_config(sentence, words):
    assert readme_agents.in_plain_words(sentence) == words


def test_what_is_missing_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"received 'Nowhere'\. Remedy: export it in torchrl_perf/envs/__init__\.py"):
        readme_agents.env_of("Nowhere")
    bare = type("Bare", (), {})
    with pytest.raises(ValueError, match=f"Bare: expected a docstring.*write one in {__name__}"):
        readme_agents.first_sentence(bare)
    with pytest.raises(TypeError, match="received Unbounded"):
        readme_agents._action_in_words(Unbounded(shape=(1,)), sizes=False)
