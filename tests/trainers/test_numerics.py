"""NaN and infinities: named by iteration, step, env and key, and kept from the learner."""

import dataclasses

import pytest
import torch
from poison import poisoned
from states import run
from tensordict import TensorDict

from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime import LossScale, compiled, no_host_sync
from torchrl_perf.trainers import (
    DQNConfig,
    DQNTrainer,
    GroupAdam,
    GuardedAdam,
    NumericalGuard,
    PPOConfig,
    PPOTrainer,
    SACConfig,
    SACTrainer,
)
from torchrl_perf.trainers.optim.optimization import is_fault
from torchrl_perf.trainers.run.numerics import Fault

PPO = PPOConfig(
    num_envs=8, num_steps=8, total_steps=640, epochs=2, minibatches=2, hidden_size=32, logger="none", device="cpu"
)
OFF_POLICY = {
    "num_envs": 8,
    "num_steps": 4,
    "total_steps": 640,
    "capacity": 256,
    "minibatch_size": 32,
    "updates_per_iteration": 2,
    "learning_starts": 64,
    "hidden_size": 16,
    "logger": "none",
    "device": "cpu",
}
DQN, SAC = DQNConfig.without_task(**OFF_POLICY), SACConfig.without_task(**OFF_POLICY)
TRAINERS = {"ppo": (PPOTrainer, PPO, CartPole), "dqn": (DQNTrainer, DQN, CartPole), "sac": (SACTrainer, SAC, Pendulum)}
MODES = ["eager", pytest.param("graph", marks=pytest.mark.gpu)]


def make(name, *, what=None, iteration=4, step=2, env=5, kind="NaN", device="cpu", **options):
    """A trainer whose env goes bad in that iteration (from 1), step (from 0) and env."""
    trainer, config, task = TRAINERS[name]
    config = dataclasses.replace(config, device=device, **options)
    if what is not None:
        task = poisoned(task, what, call=(iteration - 1) * config.num_steps + step + 1, env=env, kind=kind)
    return trainer(config, env=task(config.num_envs, device=device))


def row_of(trainer):
    return trainer.metrics.flush(trainer.iterations_done * trainer.config.batch_size)


def verdict_of(trainer):
    return trainer.guard.verdict(row_of(trainer))


def parameters(trainer):
    parts = trainer.guard._parts().values()
    return [p.detach().clone() for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters()]


def make_guard(**options):
    iteration = torch.zeros(())
    return NumericalGuard(DeviceMetrics("cpu"), iteration, **options), iteration


def batch_of(**bad):
    """``[N=3, T=4]`` of zeros; ``bad`` gives (n, t, value) for a key."""
    batch = TensorDict(
        {
            "observation": torch.zeros(3, 4, 2),
            "action": torch.zeros(3, 4, dtype=torch.int64),
            "done": torch.zeros(3, 4, 1, dtype=torch.bool),
            "action_log_prob": torch.zeros(3, 4),
            "next": {"observation": torch.zeros(3, 4, 2), "reward": torch.zeros(3, 4, 1)},
            "collector": {"weight": torch.full((3, 4), torch.nan)},
        },
        batch_size=[3, 4],
    )
    for key, (n, t, value) in bad.items():
        batch[tuple(key.split("__"))][n, t] = value
    return batch


class TestGuard:
    def test_keys_in_the_order_in_which_a_step_makes_them(self):
        guard, _ = make_guard()
        guard.check(batch_of())
        assert guard.keys == ["observation", "action_log_prob", ("next", "observation"), ("next", "reward")]

    @pytest.mark.parametrize("compile", [None, compiled])
    def test_first_by_time_then_env_then_key(self, compile, fresh_dynamo):
        guard, iteration = make_guard(compile=compile)
        iteration += 7
        guard.check(batch_of())
        guard.report()
        assert guard.verdict(guard.metrics.flush(1)) is None
        iteration += 1
        bad = {
            "observation": (0, 2, torch.nan),
            "next__reward": (2, 1, -torch.inf),
            "action_log_prob": (2, 1, torch.inf),
        }
        guard.check(batch_of(**bad))
        guard.report()
        row = guard.metrics.flush(2)
        verdict = guard.verdict(row)
        assert verdict is not None
        assert verdict.fault == Fault("action_log_prob", "inf", 8, "batch", step=1, env=2)
        assert verdict.action == "stop"
        assert "inf in 'action_log_prob' of env 2 at step 1 of iteration 8 (env step 96)" in verdict.message
        assert row["nonfinite/observation"] == 2  # values, not rows
        assert row["nonfinite/next/reward"] == row["nonfinite/action_log_prob"] == 1
        assert float(guard.first_bad) == 8

    def test_each_interval_has_its_own_first(self):
        guard, iteration = make_guard()
        for number in range(1, 7):
            iteration += 1
            guard.check(batch_of(next__reward=(number % 3, number % 4, torch.nan)) if number % 2 else batch_of())
            guard.report()
            if number in (2, 6):
                verdict = guard.verdict(guard.metrics.flush(number))
                expected = 1 if number == 2 else 3
                assert verdict.fault == Fault("next/reward", "NaN", expected, "batch", step=expected, env=expected % 3)
        assert float(guard.first_bad) == 1

    @pytest.mark.parametrize("compile", [None, compiled])
    def test_losses_and_gradients(self, compile, fresh_dynamo):
        guard, iteration = make_guard(losses=["actor", "critic"], parameters=["w", "b", "c"], compile=compile)
        iteration += 2
        no, yes = torch.tensor(False), torch.tensor(True)
        guard.note(torch.tensor([1.0, 2.0]), torch.zeros(3), no)
        guard.note(torch.tensor([1.0, torch.inf]), torch.zeros(3), no)  # forgiven, as a loss scale that was too large
        guard.note(torch.tensor([1.0, 2.0]), torch.tensor([0.0, torch.inf, torch.nan]), yes)
        guard.note(torch.tensor([torch.nan, 2.0]), torch.full((3,), torch.nan), yes)
        guard.report()
        row = guard.metrics.flush(1)
        assert (row["nonfinite/loss"], row["nonfinite/gradient"]) == (1, 1)
        verdict = guard.verdict(row)
        assert verdict.fault == Fault("b", "not finite", 2, "gradient", update=2)
        assert "a gradient that is not finite in 'b' at update 2 of iteration 2" in verdict.message

    def test_an_overflow_of_finite_parts_has_no_place_but_counts(self):
        guard, iteration = make_guard(parameters=["w"])
        iteration += 1
        guard.note(torch.ones(1), torch.ones(1), torch.tensor(True))
        guard.report()
        verdict = guard.verdict(guard.metrics.flush(1) | {"train/first_bad_iteration": 1.0})
        assert verdict.fault is None
        assert "an overflow in iteration 1" in verdict.message

    def test_a_batch_comes_before_the_updates_of_its_iteration(self):
        guard, iteration = make_guard()
        iteration += 3
        guard.check(batch_of(next__observation=(1, 3, torch.nan)))
        guard.note(torch.tensor([torch.nan]), torch.zeros(0), torch.tensor(True))
        guard.report()
        assert guard.verdict(guard.metrics.flush(1)).fault == Fault(
            "next/observation", "NaN", 3, "batch", step=3, env=1
        )

    @pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1)])
    def test_one_env_one_step(self, shape):
        guard, iteration = make_guard()
        iteration += 1
        batch = batch_of()[: shape[0], : shape[1]].clone()
        batch["next", "reward"][-1, -1] = torch.nan
        guard.check(batch)
        guard.report()
        fault = guard.verdict(guard.metrics.flush(1)).fault
        assert (fault.env, fault.step) == (shape[0] - 1, shape[1] - 1)

    def test_nothing_waits_for_the_host(self):
        guard, iteration = make_guard(on_nan="skip", parameters=["w"])
        batch = batch_of(observation=(0, 0, torch.nan))
        guard.check(batch)
        with no_host_sync("cpu"):
            iteration += 1
            guard.check(batch)
            guard.note(torch.ones(1), torch.ones(1), torch.tensor(True))
            guard.report()
            guard.repair(batch.reshape(-1))
            guard.finite(batch["observation"])


class TestAttribution:
    @pytest.mark.parametrize("name", TRAINERS)
    @pytest.mark.parametrize(
        ("what", "key"), [("reward", "next/reward"), ("state", "next/observation"), ("observation", "next/observation")]
    )
    @pytest.mark.parametrize("mode", MODES)
    def test_env(self, name, what, key, mode):
        device = "cuda" if mode == "graph" else "cpu"
        kind = "inf" if what == "state" and name != "sac" else "NaN"
        trainer = run(make(name, what=what, kind=kind, mode=mode, device=device), 3)
        assert verdict_of(trainer) is None
        run(trainer, 1)
        verdict = verdict_of(trainer)
        trainer.close()
        # the sine and cosine of an infinite angle are NaN
        assert verdict.fault == Fault(key, kind, 4, "batch", step=2, env=5)
        assert f"{kind} in {key!r} of env 5 at step 2 of iteration 4" in verdict.message
        assert float(trainer.first_bad_iteration) == 4
        assert all(p.isfinite().all() for p in parameters(trainer))

    @pytest.mark.parametrize(("name", "key"), [("ppo", "loss_objective"), ("dqn", "loss"), ("sac", "loss_critic")])
    def test_loss_of_broken_parameters(self, name, key):
        trainer = run(make(name), 3)
        row_of(trainer)
        net = {"ppo": "critic", "dqn": "q_network", "sac": "loss"}[name]
        net = getattr(trainer, net)
        for param in (net.critic if name == "sac" else net).parameters():
            param.detach().fill_(torch.nan)
        run(trainer, 1)
        fault = verdict_of(trainer).fault
        assert (fault.source, fault.iteration, fault.update) == ("loss", 4, 0)
        assert fault.key == key
        assert fault.kind == "NaN"

    @pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
    def test_gradient(self, name):
        trainer = make(name)
        chosen = trainer.guard.parameters[2]
        module = {"ppo": getattr(trainer, "loss", None), "dqn": getattr(trainer, "q_network", None)}.get(name)
        module = trainer.loss if module is None else module
        param = dict(module.named_parameters())[chosen]
        if name == "sac":  # its gradients are taken without hooks on the leaves
            step = trainer.critic_optimizer.step

            def poisoned_step(grads, loss, tau=0.0):
                grads = [torch.full_like(g, torch.inf) if number == 2 else g for number, g in enumerate(grads)]
                return step(grads, loss, tau)

            trainer.critic_optimizer.step = poisoned_step
        else:
            param.register_hook(lambda grad: torch.full_like(grad, torch.inf))
        run(trainer, 4)
        fault = verdict_of(trainer).fault
        first = 1 if name == "ppo" else trainer.config.fill_iterations + 1
        assert fault == Fault(chosen, "not finite", first, "gradient", update=0)


class TestOptimizers:
    @pytest.mark.parametrize(
        ("loss", "norm", "scale", "fault"),
        [
            (1.0, 1.0, None, False),
            (torch.nan, torch.nan, None, True),
            (1.0, torch.inf, None, True),
            (1.0, torch.inf, 1024.0, False),  # the loss scale was too large, and is halved
            (1.0, torch.inf, 1.0, True),  # nothing to halve
            (torch.nan, torch.nan, 1024.0, True),  # no scale makes the loss finite
        ],
    )
    def test_what_a_loss_scale_may_cause_is_no_fault(self, loss, norm, scale, fault):
        loss_scale = None if scale is None else LossScale("cpu", initial=scale)
        norm = torch.tensor(norm)
        if loss_scale is not None:
            norm = loss_scale.check(norm)
        assert bool(is_fault(torch.tensor(loss), norm, loss_scale)) is fault

    def test_norm_of_each_parameter_with_one_that_has_no_gradient(self):
        params = [torch.nn.Parameter(torch.ones(size)) for size in (1, 2, 4)]
        adam = GuardedAdam(params, learning_rate=0.1, max_grad_norm=1.0)
        (3.0 * params[0].sum() + 2.0 * params[2].sum()).backward()
        assert float(adam.grad_norm()) == 5.0
        assert adam.grad_norms.tolist() == [3.0, 0.0, 4.0]

    @pytest.mark.parametrize("compile", [False, True])
    @pytest.mark.parametrize("bad", [None, 0, 1, 2])
    def test_group_adam_tells_the_first_bad_gradient(self, compile, bad):
        params = [torch.nn.Parameter(torch.ones(size)) for size in (1, 3, 2)]
        adam = GroupAdam([(params[:2], 0.1), (params[2:], 0.1)], compile=compile)
        grads = [torch.ones_like(param) for param in params]
        for number in range(3):
            if bad is not None and number >= bad:
                grads[number][-1] = torch.nan
        taken, _ = adam.step(grads, torch.tensor(1.0))
        flagged = (~adam.grad_checks.isfinite()).tolist()
        assert bool(taken) is (bad is None)
        assert (flagged.index(True) if any(flagged) else None) == bad


def test_what_a_loop_of_ones_own_gets_wrong_is_told():
    with pytest.raises(ValueError, match=r"on_nan: expected one of .*, received 'ignore'"):
        make_guard(on_nan="ignore")
    for iteration, received in ((3, r"3 \(int\)"), (torch.zeros(2), r"shape \(2,\) on cpu")):
        with pytest.raises(ValueError, match=rf"iteration: expected a 0-d tensor on cpu, received {received}. Remedy"):
            NumericalGuard(DeviceMetrics("cpu"), iteration)
    guard, _ = make_guard(parameters=["weight"])
    guard.check(batch_of())
    with pytest.raises(ValueError, match=r"like the first, \[3, 4\] .* received \[3, 2\] without \[\]"):
        guard.check(batch_of()[:, :2])
    with pytest.raises(ValueError, match=r"received \[3, 4\] without \['next/reward'\]"):
        guard.check(batch_of().exclude(("next", "reward")))
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(1,\), .* received \(\) and \(1,\). Remedy"):
        guard.note(torch.zeros(()), torch.zeros(1), torch.zeros((), dtype=torch.bool))
