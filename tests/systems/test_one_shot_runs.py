"""All breaks at once as a run: what each setting does, resume, policy, ranks' parts, figures on unseen landscapes."""

import dataclasses

import pytest
import torch
from config_runs import RUN_KEYS
from declared import ADAM
from states import assert_same_state, run
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.bench import curves_breaks
from torchrl_perf.cli import main
from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.fuel_breaks import (
    ONE_SHOT_PRESETS,
    FuelBreaksOneShotConfig,
    FuelBreaksOneShotTrainer,
    OneShotConfig,
    OneShotTrainer,
    make_one_shot_env,
)
from torchrl_perf.trainers import ConfigError, load_policy, train

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "logger": "none"},
    **{"size": 6, "budget": 0.12, "fires": 4, "hidden_size": 4, "blocks": 1, "landscapes": 5, "learning_rate": 0.02},
}
EVEN = {"landscape": "uniform", "landscapes": 1}
CASES = {
    "num_envs": ({}, 8),
    "num_steps": ({}, 8),
    "total_steps": ({}, 320),
    "schedule_steps": ({}, 80),
    "seed": ({}, 1),
    "precision": ({}, "bf16"),
    "size": ({}, 7),
    "budget": ({}, 0.2),
    "landscape": ({}, "fractal"),
    "landscapes": ({}, 2),
    "landscape_seed": ({}, 2),
    "base": ({}, 0.6),
    "neighbours": ({}, 4),
    "fires": ({}, 8),
    "learning_rate": ({}, 0.1),
    "anneal_learning_rate": ({}, False),
    **ADAM,
    "entropy_weight": ({}, 0.5),
    "max_grad_norm": ({}, 1e-6),
    "hidden_size": ({}, 8),
    "blocks": ({}, 2),
}


def make(parts=None, **options):
    return FuelBreaksOneShotTrainer(FuelBreaksOneShotConfig.without_task(**{**SMALL, **options}), **(parts or {}))


def parameters(trainer):
    return torch.cat([value.detach().flatten() for value in trainer.policy.parameters()])


def learnt(**options):
    trainer = run(make(**options), 4)
    trainer.close()
    return parameters(trainer)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FuelBreaksOneShotConfig)])
def test_key_has_an_effect(field):
    if field in (*RUN_KEYS, "env", *FuelBreaksOneShotConfig.not_taken) and field not in CASES:
        return
    assert field in CASES, f"FuelBreaksOneShotConfig.{field} has no case here: add one that shows what the key does"
    shared, value = CASES[field]
    plain, other = learnt(**shared), learnt(**{**shared, field: value})
    assert plain.shape != other.shape or not torch.equal(plain, other)


def test_what_is_not_taken_is_refused():
    for field, value in {"gamma": 0.5, "compile_after": 3, "stop_return": 1.0}.items():
        with pytest.raises(ConfigError, match=f"{field}: expected"):
            FuelBreaksOneShotConfig.without_task(**{**SMALL, field: value})
    with pytest.raises(ConfigError, match="num_steps: expected an integer of at least 2"):
        make(num_steps=1)
    with pytest.raises(ConfigError, match="landscapes: expected 1 with landscape='uniform'"):
        make(landscape="uniform")
    with pytest.raises(ConfigError, match="budget: expected a share"):
        make(budget=0.01)
    with pytest.raises(ValueError, match="env: expected a FuelBreaks in mode 'one_shot'"):
        make({"env": FuelBreaks(4, size=6)})


def test_it_learns_what_the_bare_trainer_does():
    """The same draws: the first update of both has the same gradient."""
    trainer = make(num_envs=4, num_steps=4, anneal_learning_rate=False)
    ground = make_one_shot_env(trainer.config, "cpu", num_envs=1, observation="compact")
    sizes = {"rows": 4, "samples": 4, "fires": 4, "hidden_size": 4, "blocks": 1, "learning_rate": 0.02}
    bare = OneShotTrainer(ground, OneShotConfig(iterations=10, **sizes))
    trainer.policy.network.load_state_dict(bare.network.state_dict())
    for each in (bare, trainer):
        torch.manual_seed(3)
        each.step()
    for one, other in zip(bare.network.parameters(), trainer.policy.network.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_four_save_two_is_load_two(tmp_path):
    trainer = run(make(), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make(seed=9), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())


def test_an_iteration_waits_for_nothing_and_parts_add_up():
    trainer = run(make(), 1)
    with no_host_sync():
        run(trainer, 2)
    batch, _ = trainer.draw()
    left = torch.tensor(0.5)
    whole, _ = trainer._gradients(batch, left, 1)
    gradients = [value.grad.clone() for value in trainer.policy.parameters()]
    halves, _ = trainer._gradients(batch, left, 2)
    torch.testing.assert_close(whole, halves)
    for one, other in zip(gradients, trainer.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)


def test_the_policy_places_the_budget_where_it_may():
    trainer = run(make(), 3)
    unseen = make_one_shot_env(trainer.config, "cpu", num_envs=6, landscape=Landscape.varied(9, 6, count=3, base=0.4))
    seen = unseen.reset()
    drawn = set()
    for kind in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM, ExplorationType.RANDOM):
        with set_exploration_type(kind):
            action = trainer.policy(seen).get("action")
        assert action.dtype == torch.bool and (action.sum(-1) == unseen.budget).all()
        assert not (action & ~seen["action_mask"]).any()
        drawn.add(action.numpy().tobytes())
    assert len(drawn) == 3
    found = trainer.place(unseen)
    assert found.shape == (3, 6, 6)
    assert (found.flatten(1).sum(1) == unseen.budget).all()
    extra = Landscape.from_arrays(torch.zeros(6, 6), extra={"road": torch.zeros(6, 6)})
    with pytest.raises(ValueError, match="env: expected the planes"):
        trainer.place(FuelBreaks(1, landscape=extra, budget=4))


def test_a_run_leaves_a_policy(tmp_path, capsys):
    trainer = make(run_dir=str(tmp_path), log_interval=2, logger="csv", eval_interval=5, eval_episodes=4)
    result = train(trainer, progress=False)
    trainer.close()
    assert result.steps == 160
    assert result.evaluated < 0
    policy = load_policy(result.run_dir)
    seen = make_one_shot_env(trainer.config, "cpu").reset()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(policy(seen)["action"], trainer.policy(seen)["action"])
    assert main(["evaluate", str(result.run_dir), "--episodes", "4"]) == 0
    assert "-" in capsys.readouterr().out


@pytest.mark.parametrize("name", ONE_SHOT_PRESETS)
def test_presets(name):
    preset = FuelBreaksOneShotConfig(env=name)
    assert preset == ONE_SHOT_PRESETS[name]
    assert preset.iterations * preset.batch_size == preset.total_steps
    assert preset.landscape_seed != curves_breaks.UNSEEN_SEED


def test_figures_on_unseen_landscapes(monkeypatch):
    for name, value in {"UNSEEN": 3, "FIRES": 64, "SEARCH_ROUNDS": 2}.items():
        monkeypatch.setattr(curves_breaks, name, value)
    curves_breaks._rules.cache_clear()
    trainer = run(make(), 2)
    found = curves_breaks.unseen_breaks(trainer, "one-shot")
    assert set(found) >= {"trained", "none", "random", "column", "domirank", "betweenness", "search"}
    assert found["search"]["gain"] == 1.0
    assert found["none"]["burned"] > found["column"]["burned"]
    assert found["trained"]["saved"] == pytest.approx(found["column"]["burned"] - found["trained"]["burned"], abs=1e-6)
    again = curves_breaks.unseen_breaks(trainer, "one-shot")
    assert again["trained"]["burned"] == found["trained"]["burned"]
    curves_breaks._rules.cache_clear()


@pytest.mark.slow
def test_the_small_preset_finds_a_line():
    trainer = FuelBreaksOneShotTrainer(FuelBreaksOneShotConfig(env="FuelBreaksEven", device="cpu", logger="none"))
    run(trainer, trainer.config.iterations)
    curves_breaks._rules.cache_clear()
    env, rules = curves_breaks._rules((10, 0.1, "uniform", 0.5, 8), 77, "cpu")
    del env
    found = trainer.place()
    burned = float(trainer.env.assess(found, fires=1024).burned)
    assert burned < float(rules["random"][0].mean())
    assert burned < 1.25 * float(rules["column"][0].mean())


@pytest.mark.gpu
def test_a_graph_learns_as_eager_does(device):
    found = [learnt(mode=mode, device="cuda", num_envs=8) for mode in ("eager", "graph")]
    assert all(value.isfinite().all() for value in found)


PUBLISHED = {
    # keys of a published trainer's file, and the settings here that they correspond to
    **{"num_episodes": "total_steps", "num_parallel_envs": "num_envs", "steps_per_episode": "num_steps"},
    **{"grid_size": "size", "num_landscapes": "landscapes", "memory_simulations": "fires"},
    **{"percentage_increment": "budget", "pretrain_steps": "demonstrations", "experience_buffer_size": "capacity"},
    **{"train_frequency": "updates_per_iteration", "buffer_size": "capacity", "batch_size": "minibatch_size"},
    **{"initial_epsilon": "eps_start", "epsilon_min": "eps_end", "epsilon_decay": "eps_frames"},
    **{"target_update_frequency": "target_interval", "checkpoint_frequency": "checkpoint_interval"},
    **{"cleanup_frequency": "gc_interval", "memory_cleanup_frequency": "memory_rule", "output_dir": "run_dir"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_setting_is_answered_with_ours(name, capsys, tmp_path):
    ours = PUBLISHED[name].replace("_", "-")
    with pytest.raises(SystemExit):
        main(["train", "fuel-breaks", f"--{name}", "5"])
    assert f"the nearest is --{ours}" in capsys.readouterr().err
    (tmp_path / "theirs.json").write_text(f'{{"{name}": 5, "gamma": 0.95, "learning_rate": 0.0001}}')
    assert main(["train", "fuel-breaks", "--config", str(tmp_path / "theirs.json")]) == 1
    assert f"the nearest is {PUBLISHED[name]}" in capsys.readouterr().err
