"""docs/parts.md: its snippets run one after the other, and compute what the page says."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^## (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """The variables of each section's snippet after it, by the section's title."""
    torch.manual_seed(0)
    scope, kept = {}, {}
    for title, code in FENCE.findall(PAGE):
        exec(compile(code, f"docs/parts.md, {title}", "exec"), scope)
        kept[title] = dict(scope)
    return kept


def test_every_link_of_the_table_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        if target.startswith("#"):
            titles = [
                re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^## (.+)$", PAGE, re.M)
            ]
            assert target[1:] in titles
        else:
            assert (ROOT / "docs" / target.partition("#")[0]).exists()


def test_returns(names):
    batch, steps = names["Returns"]["batch"], names["Returns"]["steps"]
    assert batch["value_target"].shape == batch["advantage"].shape == (8, 32, 1)
    # the policy that acted is the one that is evaluated, so all ratios are 1: TD(1) targets
    td1 = names["Returns"]["td_lambda_targets"](0.99, 1.0, names["Returns"]["following"], **steps)
    torch.testing.assert_close(batch["value_target"], td1)


def test_n_step_transitions(names):
    sample = names["n-step transitions when they are written"]["sample"]
    assert sample["steps_to_next_obs"].max() == 3
    torch.testing.assert_close(sample["gamma"], 0.99 ** sample["steps_to_next_obs"].float())


@pytest.mark.parametrize("title", ["PPO by a penalty", "SAC with a choice and numbers"])
def test_losses_reach_every_network(names, title):
    scope = names[title]
    assert all(value.isfinite().all() for value in scope["losses"].values())
    trained = [value for value in scope["loss"].parameters() if value.grad is not None]
    assert trained
    assert all(value.grad.isfinite().all() for value in trained)
    assert any(value.grad.any() for value in scope["actor"].parameters() if value.grad is not None)


def test_the_rows_that_were_sent_are_the_callers(names):
    rows = names["Data from the host"]["rows"]
    assert rows.shape == (256, 4)
    assert 0.45 < rows.mean().item() < 0.55


def test_the_history_comes_back(names):
    scope = names["Numbers of the script"]
    again = scope["BoundedHistory"](maxlen=2)
    again.load_state_dict(scope["saved"])
    assert list(again) == [2.0, 1.0]
