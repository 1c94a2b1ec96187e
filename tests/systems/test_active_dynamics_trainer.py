"""ActiveDynamicsTrainer: the loop, windows, metrics, resume, modes, the command, refusals."""

import dataclasses
import json

import pytest
import torch
from dynamics_runs import SMALL, learnt, make
from states import assert_same_state, run

from torchrl_perf.cli import main
from torchrl_perf.envs import LatentField
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.active_dynamics import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.networks import make_field_env
from torchrl_perf.trainers import ConfigError, train

VARIANTS = {
    "D-optimal": {},
    "A-optimal": {"inputs": "fisher_a", "encoder": "mlp", "dynamics": "linear"},
    "embedding": {"inputs": "embedding", "dynamics": "mlp", "beta_schedule": "cyclic"},
    "disagreement": {"inputs": "disagreement", "dynamics": "ensemble", "mask_rate": 0.0},
    "novelty": {"inputs": "rnd", "decoder": "mlp", "random_share": 0.5},
    "random": {"inputs": "random", "history": 6},
    "normal": {"observation": "identity", "observation_size": 2, "likelihood": "gaussian", "decoder": "linear"},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_iterations_change_the_model_and_wait_for_nothing(options):
    trainer = run(make(**options), 2)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    with no_host_sync():
        run(trainer, 2)
    still = [name for name, value in trainer.model.named_parameters() if torch.equal(before[name], value)]
    assert not still
    row = trainer.metrics.flush(96)
    assert row["train/first_bad_iteration"] == -1
    assert row["train/updates_applied"] == 2 and trainer.updates == 8
    assert all(value == value for value in row.values()), row
    assert (row["train/loss_novelty"] > 0) == (options.get("inputs") == "rnd")
    trainer.close()


@variants
def test_three_save_two_is_load_two(options, tmp_path):
    trainer = run(make(**options), 3)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make(**{**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    assert resumed.metrics.flush(1) == trainer.metrics.flush(1)


def test_same_seed_same_model():
    first, second, other = (learnt(run(make(seed=seed), 3)) for seed in (4, 4, 5))
    assert torch.equal(first, second) and not torch.equal(first, other)


class TestWindows:
    def test_they_are_steps_in_a_row_of_the_ring(self):
        trainer = run(make(num_envs=2, history=13), 1)
        for iteration in range(4):
            rows, begins = trainer._draw(trainer.window.view()["mask"])
            filled = min(13, 8 * (iteration + 1))
            assert rows.shape == begins.shape == (2, 4)
            assert (begins >= 13 - filled).all() and (begins <= 13 - 6).all()
            view = trainer.window.view()
            windows = trainer._gather(view, rows[0], begins[0])
            for number, (row, begin) in enumerate(zip(rows[0].tolist(), begins[0].tolist(), strict=True)):
                for key in ("observation", "action", "is_init", "hidden"):
                    assert torch.equal(windows[key][number], view[key][row, begin : begin + 6]), key
            run(trainer, 1)

    def test_every_start_is_drawn(self):
        trainer = run(make(history=8, updates=40), 1)
        rows, begins = trainer._draw(trainer.window.view()["mask"])
        assert set(rows.unique().tolist()) == {0, 1, 2} and set(begins.unique().tolist()) == {0, 1, 2}

    def test_the_beliefs_of_a_window_are_those_of_the_filter(self):
        trainer = run(make(updates=1, learning_rate=1e-12), 1)
        view = trainer.window.view()
        windows = trainer._gather(view, *(part[0] for part in trainer._draw(view["mask"])))
        with torch.no_grad():
            again = trainer.model.encode(
                *(windows["observation"], windows["action"], windows["is_init"].squeeze(-1)),
                *(windows["hidden"][:, 0], windows["previous_action"][:, 0]),
            )
        assert (again.loc - windows["belief"]).abs().max() < 1e-5


class TestSchedules:
    def test_random_inputs_first(self):
        trainer = make(random_steps=30, random_share=0.25)  # 24 steps an iteration
        shares = []
        for _ in range(4):
            run(trainer, 1)
            shares.append(float(trainer.policy.random_share))
        assert shares == [1.0, 1.0, 0.25, 0.25]

    def test_beta_follows_the_updates(self):
        trainer = make(beta=2.0, beta_schedule="linear", beta_warmup=2, beta_anneal=4)
        betas = []
        for _ in range(5):
            run(trainer, 1)
            betas.append(float(trainer.loss.beta))
        assert betas == [0.0, 0.5, 1.5, 2.0, 2.0]

    def test_what_is_known_is_remembered(self):
        trainer = run(make(), 1)
        once = trainer.reward.information.clone()
        assert (once > 0).any()
        assert (run(trainer, 1).reward.information.sum() > once.sum()).item()


class TestCommand:
    def test_it_trains_and_resumes(self, tmp_path, capsys):
        options = {**SMALL, "total_steps": 72, "run_dir": str(tmp_path), "logger": "csv", "log_interval": 1}
        arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        assert main(["train", "active-dynamics", *arguments, "--no-progress"]) == 0
        folder = tmp_path / "active-dynamics-limit_cycle-0"
        assert json.loads((folder / "config.json").read_text())["algorithm"] == "active-dynamics"
        assert (folder / "progress.csv").is_file()
        more = ["--resume", str(folder), "--total-steps", "120", "--no-progress"]
        assert main(["train", "active-dynamics", *more]) == 0
        assert "120 steps" in capsys.readouterr().out

    def test_the_best_is_kept_by_its_predictions(self, tmp_path):
        trainer = make(run_dir=str(tmp_path), checkpoint_interval=1, log_interval=1, total_steps=72)
        result = train(trainer, progress=False)
        trainer.close()
        assert (result.run_dir / "checkpoints" / "best.pt").is_file()

    def test_presets(self):
        assert [config.env for config in ACTIVE_DYNAMICS_PRESETS.values()] == list(ACTIVE_DYNAMICS_PRESETS)
        for config in ACTIVE_DYNAMICS_PRESETS.values():
            assert type(config).from_dict(config.card()) == config


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, VARIANTS["embedding"], VARIANTS["disagreement"], VARIANTS["novelty"]])
def test_captured_runs(options):
    trainer = run(make(**{**options, "device": "cuda", "mode": "graph"}), 6)
    row = trainer.metrics.flush(96)
    assert row["train/updates_applied"] == 2 and row["train/first_bad_iteration"] == -1
    trainer.close()


@pytest.mark.parametrize("env", ["double_limit_cycle", "van_der_pol", "duffing", "snowman", "multi_attractor"])
def test_other_fields(env):
    trainer = run(make(env=env), 1)
    assert trainer.metrics.flush(24)["train/updates_applied"] == 2
    trainer.close()


def test_the_world_is_the_same_for_each_seed():
    points = torch.randn(5, 2)
    config = ActiveDynamicsConfig.without_task(**{**SMALL, "env": "multi_attractor"})
    first, second = (make_field_env(config, torch.device("cpu"), seed) for seed in (1, 2))
    assert torch.equal(first.field(points), second.field(points))
    assert torch.equal(first.observation_map(points), second.observation_map(points))


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"window": 9}, "num_steps: expected at least the window of 9"),
            ({"history": 5}, "history: expected at least the window"),
            ({"prediction_horizon": 8}, "prediction_horizon: expected fewer than num_steps = 8"),
            ({"elites": 7}, "elites: expected at most the 6 candidates"),
            ({"inputs": "disagreement"}, "Remedy: dynamics='ensemble'"),
            ({"dynamics": "ensemble"}, "Remedy: inputs='disagreement'"),
            ({"observation": "linear"}, "likelihood: expected 'gaussian'"),
            ({"observation": "identity", "likelihood": "gaussian"}, "observation_size: expected 2"),
            ({"env": "circle"}, "env: expected one of"),
            ({"dynamics": "rbf_ensemble"}, "Remedy: inputs='disagreement'"),
            ({"start": (0.0, 0.0, 0.0)}, "start: expected two numbers"),
            ({"goal": (1.0,)}, "goal: expected two numbers, or none"),
            ({"extent": 2.0, "start": (1.0, 0.0)}, "extent: expected 0 or a number above 2.5, .* Remedy: extent=3.5"),
            ({"inputs": "goal", "known_map": True}, r"goal: expected a point with .* received \(\)"),
            ({"inputs": "goal", "goal": (1.0, 0.0)}, "known_map: expected True"),
            (
                {"inputs": "random", "goal": (1.0, 0.0), "known_map": True, "goal_weight": 1.0},
                "goal_weight: expected 0 with inputs='random'",
            ),
            ({"region_weight": 1.0}, "known_map: expected True"),
            ({"known_map": True, "decoder": "mlp"}, "decoder: expected 'log_linear' with known_map"),
            ({"known_map": True, "latent_size": 3}, "latent_size: expected 2 with known_map"),
            (
                {"known_map": True, "observation": "mlp", "likelihood": "gaussian"},
                "known_map: expected False with observation='mlp'",
            ),
            ({"centres": 1}, "centres: expected an integer of at least 2"),
            ({"mask_rate": 1.5}, "mask_rate: expected a number in"),
        ],
    )
    def test_settings(self, options, said):
        with pytest.raises(ConfigError, match=said):
            ActiveDynamicsConfig.without_task(**{**SMALL, **options})

    def test_an_env_of_another_size(self):
        with pytest.raises(ValueError, match="expected 3 rows"):
            make(LatentField(2))

    def test_each_problem_is_named_once(self):
        with pytest.raises(ConfigError) as caught:
            ActiveDynamicsConfig.without_task(window=1, elites=99, gamma=2.0)
        assert len(caught.value.problems) == 3

    def test_fields_are_documented(self):
        assert len(dataclasses.fields(ActiveDynamicsConfig)) > 40
