"""The choice of an option learnt from the critics, and steps learnt from as those of other options."""

import pytest
import torch
from states import run

from torchrl_perf.modules.option_set import OptionSet, TimeHazard
from torchrl_perf.trainers import ConfigError, SACOptionsConfig, SACOptionsTrainer

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 16},
    **{"capacity": 64, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 16, "logger": "none"},
}


def make(parts=None, **options):
    config = SACOptionsConfig.without_task(**{**SMALL, "option_learning": "critic", **options})
    return SACOptionsTrainer(config, **(parts or {}))


def test_values_are_those_of_the_critics():
    trainer = run(make(initial_temperature=1e-6, learn_temperature=False), 4)
    algorithm = trainer.algorithm
    sample = trainer.buffer.sample(16)
    values = algorithm.passes.option_values(sample)
    count = algorithm.options.num_options
    assert values.shape == (16, count)
    for option in range(count):
        rows = sample.clone().set("active_option", torch.full((16,), option))
        # a deterministic actor would give them exactly; many draws give their mean
        drawn = []
        for _ in range(200):
            action, _ = algorithm.loss.sample_states(rows)
            drawn.append(algorithm.loss.values(algorithm.loss.critic, rows, action).amin(-1))
        low, high = torch.stack(drawn).amin(0), torch.stack(drawn).amax(0)
        assert ((values[:, option] >= low - 0.05) & (values[:, option] <= high + 0.05)).float().mean() > 0.9


def test_the_choice_goes_where_the_value_is():
    """Of fixed values the choice becomes a softmax with the entropy's weight as temperature."""
    trainer = run(make(option_entropy_coeff=0.5), 2)
    passes, algorithm = trainer.algorithm.passes, trainer.algorithm
    sample = trainer.buffer.sample(16)
    values = torch.linspace(-1.0, 1.0, algorithm.options.num_options).expand(16, -1)
    optimizer = torch.optim.Adam(algorithm.option_params, lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (loss,), _ = passes._critic_part((sample, values))
        loss.backward()
        optimizer.step()
    rows = passes.rows(sample)
    available = passes.controller.available(rows)
    found = passes.controller.log_probs(rows, available)
    expected = (values / 0.5).masked_fill(~available, -torch.inf).log_softmax(-1)
    assert (found.exp() - expected.exp()).abs().max() < 0.05


def test_an_option_thought_little_of_is_found_again():
    """With the factor pi(o) in the gradient it is not: exp(-100) and less."""
    trainer = run(make(option_entropy_coeff=0.02), 2)
    passes, algorithm = trainer.algorithm.passes, trainer.algorithm
    sample = trainer.buffer.sample(16)
    optimizer = torch.optim.Adam(algorithm.option_params, lr=0.02)
    rows = passes.rows(sample)
    available = passes.controller.available(rows)
    rising = torch.linspace(-1.0, 1.0, algorithm.options.num_options).expand(16, -1)
    for values, steps in ((rising, 150), (-rising, 60)):
        for _ in range(steps):
            optimizer.zero_grad()
            (loss,), _ = passes._critic_part((sample, values))
            loss.backward()
            optimizer.step()
        found = passes.controller.log_probs(rows, available).argmax(-1)
        assert torch.equal(found, values.masked_fill(~available, -torch.inf).argmax(-1))


def test_without_entropy_it_is_the_best_option():
    trainer = run(make(option_entropy_coeff=0.0), 2)
    sample = trainer.buffer.sample(16)
    values = torch.randn(16, trainer.algorithm.options.num_options)
    (loss,), _ = trainer.algorithm.passes._critic_part((sample, values))
    controller, rows = trainer.algorithm.controller, trainer.algorithm.passes.rows(sample)
    available = controller.available(rows)
    best = values.masked_fill(~available, -torch.inf).argmax(-1, keepdim=True)
    expected = -controller.log_probs(rows, available).gather(-1, best).mean()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("how", [{}, {"option_learning": "returns", "option_capacity": 16}])
def test_a_decay_finds_that_the_losses_depend_on_all_networks(how):
    """The passes of actor and critics lie within those of the options."""
    plain, decayed = (run(make(weight_decay=decay, **how), 4) for decay in (0.0, 0.5))
    pairs = zip(plain.algorithm.loss.parameters(), decayed.algorithm.loss.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_no_choices_are_kept():
    trainer = run(make(), 3)
    assert not hasattr(trainer.algorithm, "choices")
    assert "train/option_kl" not in trainer.metrics.flush(1)
    assert set(trainer.algorithm.experience()) == {"option_usage"}


def test_steps_become_those_of_options_that_fit():
    ranges = ((-1.0, 0.5), (-0.5, 1.0), 0.1)
    options = OptionSet(
        ("left", "right", "stay"), termination=TimeHazard(3, hazard_max=3, steepness=0.4), action_range=ranges
    )
    trainer = run(make({"options": options}, option_relabel=1.0), 4)
    algorithm, sample = trainer.algorithm, trainer.buffer.sample(64)
    low, high = algorithm._ranges
    option, of_actor = algorithm.relabelled(sample)
    action = sample.get("action")
    changed = option != sample.get("active_option")
    assert changed.any() and not changed.all()
    assert ((action >= low[option]) & (action <= high[option])).all(-1)[changed].all()
    assert algorithm.controller.available(sample).gather(-1, option.unsqueeze(-1)).squeeze(-1)[changed].all()
    # the actor learns below all that may begin, whatever was done
    assert (of_actor.bincount(minlength=3) > 64 / 6).all()
    algorithm.controller.write_following(sample).set("actor_option", of_actor)
    learnt = sample.clone().set("active_option", of_actor)
    noise = torch.randn(128, *action.shape[1:])
    found = [algorithm.passes.context(td, noise).action for td in (sample, learnt.exclude("actor_option"))]
    assert torch.equal(*found)
    assert ((found[0] >= low[of_actor]) & (found[0] <= high[of_actor])).all()


def test_nothing_is_relabelled_without_a_share():
    trainer = run(make(option_relabel=0.0), 4)
    sample = trainer.buffer.sample(16)
    before = sample.get("active_option").clone()
    trainer.algorithm.update(sample, 0)
    assert torch.equal(sample.get("active_option"), before)
    assert sample.get("actor_option", None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"option_clip": 0.1}, "option_clip: expected 0.2 with option_learning='critic'"),
        ({"option_capacity": 100}, "option_capacity: expected 2000 with option_learning='critic'"),
        ({"option_relabel": 1.5}, r"option_relabel: expected a number in \[0, 1\]"),
        ({"option_learning": "other"}, "option_learning: expected"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_values_of_your_own_are_refused():
    with pytest.raises(ValueError, match="option_value: expected None with option_learning='critic'"):
        make({"option_value": torch.nn.Linear(3, 2)})
