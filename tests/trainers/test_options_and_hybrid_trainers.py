"""SAC with options: what is stored, the controller's update, the collapse warning. Hybrid PPO: keys, parts, losses."""

import pytest
import torch
from config_runs import KINDS, SMALL, make
from states import run
from torchrl.envs import TransformedEnv

from torchrl_perf.envs import Ferry, HybridTarget, Pendulum
from torchrl_perf.metrics import OptionCollapseWarning
from torchrl_perf.modules import FusedMLP, HybridActor, OptionSet, hybrid_features
from torchrl_perf.trainers import HybridPPOTrainer, SACOptionsTrainer
from torchrl_perf.transforms import OptionState


class TestOptions:
    def test_each_option_that_ends_is_stored_once_with_its_reward_and_duration(self):
        trainer = make(
            "sac-options",
            {"option_capacity": 999, "capacity": 999, "num_steps": 25, "total_steps": 2_000, "gamma": 0.9},
        )
        batches = []
        for _ in range(4):
            collect = trainer.collect
            trainer.collect = lambda collect=collect: batches.append(collect().clone()) or batches[-1]
            run(trainer, 1)
            trainer.collect = collect
        starts = torch.cat([batch["option_start"] for batch in batches], 1)
        rewards = torch.cat([batch["next", "reward"].squeeze(-1) for batch in batches], 1)
        done = torch.cat([batch["next", "done"].squeeze(-1) for batch in batches], 1)
        expected = []
        for row in range(4):
            places = starts[row].nonzero().flatten().tolist()
            for first, following in zip(places, [*places[1:], None], strict=True):
                if following is not None:  # what is open, or ended with the last step, comes with the next batch
                    assert done[row, first:following].sum() <= 1
                    rewarded = rewards[row, first:following]
                    returned = sum(0.9**i * float(reward) for i, reward in enumerate(rewarded))
                    expected.append((following - first, round(returned, 3)))
        written = int(trainer.choices.written)
        columns = trainer.choices.columns
        found = zip(
            columns["steps_to_next_obs",][:written].flatten().tolist(),
            columns["next", "reward"][:written].flatten().tolist(),
            strict=True,
        )
        assert sorted(expected) == sorted((steps, round(value, 3)) for steps, value in found)

    def test_the_controller_learns_and_acts(self):
        trainer = run(make("sac-options", {}), 3)
        controller = trainer.policy.controller
        assert controller is trainer.loss.option.controller
        before = [param.clone() for param in controller.parameters()]
        run(trainer, 2)
        assert not any(torch.equal(*pair) for pair in zip(before, controller.parameters(), strict=True))
        row = trainer.metrics.flush(1)
        assert row["option/usage_west"] + row["option/usage_east"] == pytest.approx(1.0)
        assert {"train/loss_option", "train/option_entropy", "train/option_kl"} <= set(row)

    def test_actions_of_the_first_frames_are_the_policys(self):
        trainer = make("sac-options", {"learning_starts": 48})
        batch = trainer.collect()
        assert batch["option_start"][:, 0].all()
        low = torch.where(batch["active_option"] == 0, -1.0, 0.0)
        action = batch["action"].squeeze(-1)
        assert ((action >= low) & (action <= low + 1)).all()

    def test_a_collapse_is_told_with_the_row(self):
        trainer = make("sac-options", {"total_steps": 640})
        with torch.no_grad():
            trainer.controller.selector[-1].bias.copy_(torch.tensor([100.0, 0.0]))
        for _ in range(5):
            trainer.store(trainer.collect())
        with pytest.warns(OptionCollapseWarning, match="the options have collapsed"):
            row = trainer.summarise(trainer.metrics.flush(1))
        assert (row["option/max_usage"], row["option/num_used"]) == (1.0, 1.0)

    def test_a_rollback_leaves_what_the_options_did(self):
        trainer = make("sac-options", {"on_nan": "rollback"})
        assert not {"option_segments", "option_choices"} & trainer.parts().keys()
        assert {"option_segments", "option_choices"} <= trainer.state_dict()["parts"].keys()

    def test_own_options_and_env(self):
        options = OptionSet(("gentle", "strong"), action_range=(0.2, 1.0), termination=_always)
        env = TransformedEnv(Pendulum(4), OptionState(2))
        trainer = run(SACOptionsTrainer(KINDS["sac-options"](**SMALL["sac-options"]), env=env, options=options), 4)
        assert int(trainer.updates) == 6
        assert trainer.options is options

    def test_own_policy(self):
        first = make("sac-options", {})
        config = KINDS["sac-options"](**SMALL["sac-options"])
        value = FusedMLP(3, 2, hidden_size=16)
        trainer = run(SACOptionsTrainer(config, env=first.env, policy=first.policy, option_value=value), 3)
        assert trainer.policy is first.policy
        assert trainer.loss.option.value is value

    def test_a_task_without_options(self):
        with pytest.raises(ValueError, match=r"env: expected a task that has options, Ferry, received 'Pendulum'"):
            make("sac-options", {"env": "Pendulum"})
        with pytest.raises(ValueError, match="policy: expected an OptionPolicy, received Linear"):
            make("sac-options", {}, policy=torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match=r"policy: expected in_keys .*received \['option', 'option_age'\]. Remedy"):
            make("sac-options", {}, env=Ferry(4))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("option_learning_rate", 0.0),
            ("option_temperature", 0.0),
            ("option_entropy_coeff", -1.0),
            ("option_clip", 1.0),
            ("option_capacity", 0),
            ("option_capacity", 8),
        ],
    )
    def test_bad_settings_are_named(self, field, value):
        with pytest.raises(ValueError, match=rf"{field}: expected .*received {value!r}"):
            KINDS["sac-options"](**{**SMALL["sac-options"], field: value})


def _always(td):
    return torch.ones(*td.shape, 2)


class TestHybridPPO:
    @pytest.mark.parametrize("loss", ["device", "torchrl"])
    def test_keys_of_all_parts_reach_the_loss(self, loss):
        trainer = run(make("hybrid-ppo", {"loss": loss}), 2)
        expected = {
            "observation",
            ("action", "discrete"),
            ("action", "continuous"),
            ("action", "discrete_log_prob"),
            ("action", "continuous_log_prob"),
            "advantage",
            "value_target",
            "state_value",
        }
        assert set(trainer.algorithm.row_keys) == expected
        assert not [key for key in trainer.collector.batch.keys(True, True) if "params" in key]

    def test_losses_of_the_package_and_of_torchrl_are_the_same(self):
        rows = []
        for loss in ("device", "torchrl"):
            trainer = run(make("hybrid-ppo", {"loss": loss, "epochs": 1, "minibatches": 1}), 1)
            rows.append(trainer.metrics.flush(1))
        for name in ("train/loss_objective", "train/loss_critic", "train/kl_approx"):
            assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-5), name

    def test_an_own_actor(self):
        env = HybridTarget(4)
        actor = HybridActor(FusedMLP(2, hybrid_features(env.full_action_spec)), spec=env.full_action_spec)
        trainer = run(HybridPPOTrainer(KINDS["hybrid-ppo"](**SMALL["hybrid-ppo"]), env=env, actor=actor), 2)
        assert trainer.actor is actor

    @pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
    def test_one_part(self, env):
        trainer = run(make("hybrid-ppo", {"env": env}), 2)
        assert trainer.metrics.flush(1)["train/first_bad_iteration"] == -1

    def test_a_task_that_does_not_exist(self):
        with pytest.raises(ValueError, match=r"env: expected one of .*received 'Fery'\. Remedy: --env Ferry"):
            make("hybrid-ppo", {"env": "Fery"})
