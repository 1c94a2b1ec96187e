"""What stop, skip and rollback do with bad rows, losses and gradients: in the trainers, and in whole runs."""

import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from config_runs import updates_of
from poison import poisoned
from test_numerics import MODES, PPO, SAC, TRAINERS, make, parameters, row_of, run, verdict_of

from torchrl_perf.collectors import HostCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import TrainingDivergedError, make_sac_actor, train
from torchrl_perf.trainers.on_policy.minibatches import flat_rows

VARIANTS = [
    ("ppo", {}),
    ("dqn", {}),
    ("dqn", {"sampler": "prioritized", "n_step": 3}),
    ("dqn", {"compact": True}),
    ("sac", {}),
    ("sac", {"sampler": "prioritized"}),
]


def equal(one, two):
    return all(torch.equal(*pair) for pair in zip(parameters(one), parameters(two), strict=True))


class TestEnv:
    @pytest.mark.parametrize("kind", ["NaN", "inf", "-inf"])
    def test_a_state_that_is_not_finite_is_truncated_and_drawn_anew(self, kind, device):
        env = poisoned(CartPole, "state", call=2, env=1, kind=kind)(3, device=device)
        env.resets_nonfinite = True
        root = env.reset()
        for step in (1, 2, 3):
            with no_host_sync(device):
                stepped, root = env.step_and_maybe_reset(
                    root.set("action", torch.zeros(3, dtype=torch.int64, device=device))
                )
            ends = [[False], [step == 2], [False]]
            assert stepped["next", "truncated"].tolist() == stepped["next", "done"].tolist() == ends
            assert not stepped["next", "terminated"][1]
            assert root["observation"].isfinite().all()
            assert env.state.isfinite().all()

    def test_by_default_it_stays(self):
        env = poisoned(CartPole, "state", call=1, env=0)(2, device="cpu")
        _, root = env.step_and_maybe_reset(env.reset().set("action", torch.zeros(2, dtype=torch.int64)))
        assert root["observation"].isnan().all(-1).tolist() == [True, False]

    def test_policy_decides(self):
        assert not make("ppo").env.resets_nonfinite
        assert make("ppo", on_nan="skip").env.resets_nonfinite
        assert make("sac", on_nan="rollback").env.resets_nonfinite


class TestSkip:
    @pytest.mark.parametrize(("name", "options"), VARIANTS)
    def test_without_a_fault_it_changes_no_number(self, name, options):
        assert equal(run(make(name, **options), 5), run(make(name, on_nan="skip", **options), 5))

    @pytest.mark.parametrize(("name", "options"), VARIANTS)
    @pytest.mark.parametrize("what", ["state", "reward", "observation"])
    @pytest.mark.parametrize("mode", MODES)
    def test_learning_goes_on(self, name, options, what, mode):
        device = "cuda" if mode == "graph" else "cpu"
        trainer = run(make(name, what=what, iteration=3, on_nan="skip", mode=mode, device=device, **options), 3)
        before = parameters(trainer)
        verdict = verdict_of(trainer)
        assert (verdict.action, verdict.fault.env, verdict.fault.step) == ("skip", 5, 2)
        run(trainer, 5)
        row = row_of(trainer)
        assert row["nonfinite/loss"] == row["nonfinite/gradient"] == 0
        assert row["train/updates_applied"] == updates_of(trainer)
        assert all(p.isfinite().all() for p in parameters(trainer))
        assert not all(torch.equal(*pair) for pair in zip(before, parameters(trainer), strict=True))
        assert all(np.isfinite(value) for name, value in row.items() if name.startswith(("train", "episode")))

    @pytest.mark.parametrize("name", TRAINERS)
    def test_other_envs_see_the_same_transitions(self, name):
        pair = []
        for what in ("state", None):
            trainer = make(name, what=what, iteration=2, on_nan="skip")
            pair.append(run(trainer, 1).collect())
        others = [n for n in range(8) if n != 5]
        for key in ("observation", "action", ("next", "reward"), ("next", "observation")):
            one, two = (batch.get(key)[others] for batch in pair)
            assert torch.equal(one, two), key
        assert not torch.equal(pair[0]["next", "observation"][5], pair[1]["next", "observation"][5])

    def test_ppo_learns_from_good_rows_alone(self):
        """An update with bad rows is one with the good row before each in its place."""
        results = []
        for by_hand in (False, True):
            trainer = run(make("ppo", on_nan="skip"), 1)
            trainer.schedule()
            batch = trainer.collect()
            ended = batch["next", "done"][5, :4].any()
            batch["next", "reward"][5, 4] = torch.nan
            trainer.advantage(batch)
            assert ended or batch["advantage"][5, :5].isnan().all()  # the NaN stays in its episode
            assert batch["advantage"][:5].isfinite().all()
            if by_hand:
                rows = flat_rows(batch, trainer.algorithm.row_keys)
                bad = rows["advantage"].isnan().squeeze(-1)
                for number in torch.nonzero(bad).flatten().tolist():
                    for key in rows.keys(True, True):
                        rows.get(key)[number] = rows.get(key)[number - 1]
                assert not batch["advantage"].isnan().any()
            torch.manual_seed(3)
            trainer.update(batch)
            results.append(trainer)
        assert equal(*results)

    def test_a_bad_row_is_drawn_no_more(self):
        trainer = run(make("dqn", what="reward", iteration=3, on_nan="skip", sampler="prioritized", capacity=256), 3)
        stored = trainer.buffer.storage.get(torch.arange(96))
        bad = int(stored["next", "reward"].isnan().flatten().to(torch.int64).argmax())
        trainer.buffer.update_priority(torch.tensor([bad]), torch.tensor([1e6]))
        sample = trainer._draw(32)
        assert sample["next", "reward"].isfinite().all()
        assert bad not in sample["index"].tolist()
        assert sum(bad in trainer.buffer.sample(32)["index"].tolist() for _ in range(20)) <= 2

    def test_a_run_that_cannot_learn_ends(self):
        trainer = run(make("dqn", on_nan="skip"), 3)
        row_of(trainer)
        for param in trainer.q_network.parameters():
            param.detach().fill_(torch.inf)
        run(trainer, 2)
        verdict = verdict_of(trainer)
        assert verdict.action == "stop"
        assert "No update of the interval could be made" in verdict.message

    @pytest.mark.parametrize("name", TRAINERS)
    def test_whole_run(self, name, tmp_path, caplog):
        trainer = make(name, what="state", iteration=4, on_nan="skip", log_interval=2, logger="csv")
        with caplog.at_level(logging.WARNING, logger="torchrl_perf"):
            result = train(trainer, tmp_path, progress=False)
        assert result.exit_code == 0
        assert sum("of env 5 at step 2 of iteration 4" in record.message for record in caplog.records) == 1
        lines = (tmp_path / "progress.csv").read_text().splitlines()
        column = lines[0].split(",").index("nonfinite/next/observation")
        counts = [float(line.split(",")[column]) for line in lines[1:]]
        assert counts[0] == 0
        assert counts[1] > 0
        assert not any(counts[2:])


class TestStop:
    @pytest.mark.parametrize("name", TRAINERS)
    def test_whole_run(self, name, tmp_path):
        trainer = make(name, what="reward", iteration=4, log_interval=2, checkpoint_interval=1)
        bad = "NaN in 'next/reward' of env 5 at step 2 of iteration 4"
        with pytest.raises(TrainingDivergedError, match=bad) as told:
            train(trainer, tmp_path, progress=False)
        assert f"To go on from it: torchrl-perf train {name} --resume {tmp_path}" in str(told.value)
        assert trainer.iterations_done == 5  # one behind the row
        assert all(p.isfinite().all() for p in parameters(trainer))


class TestRollback:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", TRAINERS)
    def test_networks_and_moments_go_back_and_random_numbers_do_not(self, name, mode):
        device = "cuda" if mode == "graph" else "cpu"
        random_state = torch.cuda.get_rng_state if mode == "graph" else torch.get_rng_state
        trainer = make(name, on_nan="rollback", mode=mode, device=device)
        guard = trainer.guard
        guard.snapshot()
        run(trainer, 4)
        guard.snapshot()
        kept, state = parameters(trainer), random_state()
        run(trainer, 1)
        assert verdict_of(trainer) is None  # the snapshot at iteration 4 is good from here on
        run(trainer, 1)
        for param in parameters(trainer):
            assert param.isfinite().all()
        for part in guard._parts().values():
            for param in part.parameters() if isinstance(part, torch.nn.Module) else ():
                param.detach().fill_(torch.nan)
        addresses = [p.data_ptr() for part in guard._parts().values() if hasattr(part, "parameters")
                     for p in part.parameters()]  # fmt: skip
        run(trainer, 1)
        verdict = verdict_of(trainer)
        assert verdict.action == "rollback"
        guard.rollback()
        assert all(torch.equal(*pair) for pair in zip(kept, parameters(trainer), strict=True))
        assert addresses == [p.data_ptr() for part in guard._parts().values() if hasattr(part, "parameters")
                             for p in part.parameters()]  # fmt: skip
        assert not torch.equal(state, random_state())
        assert float(trainer.first_bad_iteration) == -1
        run(trainer, 3)
        assert verdict_of(trainer) is None
        assert guard.rollbacks in (0, 1)

    def test_a_snapshot_of_a_bad_interval_is_not_gone_back_to(self):
        trainer = make("ppo", what="reward", iteration=2, on_nan="rollback")
        first = parameters(trainer)
        trainer.guard.snapshot()
        run(trainer, 2)
        trainer.guard.snapshot()
        assert verdict_of(trainer).action == "rollback"
        trainer.guard.rollback()
        assert all(torch.equal(*pair) for pair in zip(first, parameters(trainer), strict=True))

    def test_a_good_interval_after_the_last_snapshot_clears_the_count(self):
        trainer = make("ppo", what="reward", iteration=2, on_nan="rollback")
        trainer.guard.snapshot()
        run(trainer, 2)
        assert verdict_of(trainer).action == "rollback"
        trainer.guard.rollback()
        assert trainer.guard.rollbacks == 1
        trainer.guard.snapshot()
        run(trainer, 2)
        assert verdict_of(trainer) is None
        assert trainer.guard.rollbacks == 0

    def test_no_snapshot(self):
        with pytest.raises(RuntimeError, match=r"expected a snapshot, received none\. Remedy"):
            make("ppo").guard.rollback()

    def test_whole_run_goes_on_after_one(self, tmp_path, caplog):
        trainer = make("ppo", what="reward", iteration=4, on_nan="rollback", log_interval=2, logger="csv")
        with caplog.at_level(logging.WARNING, logger="torchrl_perf"):
            result = train(trainer, tmp_path, progress=False)
        assert result.steps == PPO.total_steps
        assert sum("go back to the last good interval" in record.message for record in caplog.records) == 1
        steps = [int(line.split(",")[0]) for line in (tmp_path / "progress.csv").read_text().splitlines()[1:]]
        assert steps == sorted(set(steps))

    def test_three_in_a_row_and_no_more(self, tmp_path, caplog):
        trainer = make("ppo", on_nan="rollback", log_interval=1, learning_rate=1e-3)
        loss = trainer.loss.forward
        trainer.loss.forward = lambda td: loss(td) * torch.nan
        with (
            caplog.at_level(logging.WARNING, logger="torchrl_perf"),
            pytest.raises(TrainingDivergedError, match="Rolled back 3 times"),
        ):
            train(trainer, tmp_path, progress=False)
        assert sum("go back to the last good interval" in record.message for record in caplog.records) == 3


class BadGymEnv(gym.Env):
    """Pendulum-like spaces; the third step of its second life gives an observation that is NaN."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self, bad_call):
        self.calls, self.bad_call = 0, bad_call

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.calls += 1
        value = np.nan if self.calls == self.bad_call else 0.5
        return np.full(3, value, np.float32), 1.0, False, self.calls % 10 == 0, {}


@pytest.mark.filterwarnings("ignore:.*")  # gymnasium's own checks of the observations
def test_host_env_is_named(monkeypatch):
    monkeypatch.setattr(gym.logger, "warn", lambda *args, **kwargs: None)
    bad = [0, 0, 14, 0, 0, 0, 0, 0]
    envs = gym.vector.SyncVectorEnv(
        [lambda call=call: BadGymEnv(call) for call in bad], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    actor = make_sac_actor(*_specs(), SAC)
    collector = HostCollector(envs, actor, frames_per_batch=32, init_random_frames=64, seed=0)
    trainer = TRAINERS["sac"][0](SAC, collector=collector, critic=_critic())
    run(trainer, 5)
    verdict = verdict_of(trainer)
    collector.shutdown()
    assert verdict.fault.env == 2
    assert (verdict.fault.iteration, verdict.fault.step) == (4, 1)  # call 14 of 4 a batch
    assert verdict.fault.key == "next/observation"


def _specs():
    env = Pendulum(8, device="cpu")
    return env.observation_spec["observation"], env.action_spec


def _critic():
    from torchrl_perf.trainers import make_sac_critic

    return make_sac_critic(*_specs(), SAC)
