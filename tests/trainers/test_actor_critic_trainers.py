"""DDPG, TD3, AC-IQN: order and values of an update, the actor's delay, noise, given parts, bad settings."""

import gymnasium
import pytest
import torch
from config_runs import KINDS, SMALL, make
from states import run
from torchrl.data import Bounded, Unbounded

from torchrl_perf.collectors import DeviceCollector, HostCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules.noise import GaussianNoise, OUNoise
from torchrl_perf.trainers import DDPGTrainer, make_deterministic_actor

NAMES = ["ddpg", "td3", "ac-iqn"]


def copies(module):
    return [param.detach().clone() for param in module.parameters()]


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_order_and_values_of_an_update(name):
    """Against the same steps written out: the critic first, the actor on the critic so updated, then the targets."""
    trainer, reference = (run(make(name, {"max_grad_norm": 0.5}), 3) for _ in range(2))
    sample = trainer.buffer.sample()
    trainer.update_number = 1
    torch.manual_seed(5)
    trainer.update(sample.clone())

    loss = reference.loss
    torch.manual_seed(5)
    noise = reference.passes.noise(sample)
    given = () if name == "ac-iqn" else (noise,)
    steps = [
        (reference.critic_optimizer, lambda: loss.critic_losses(sample, *given)[0]),
        (reference.actor_optimizer, lambda: loss.actor_losses(sample)),
    ]
    for optimizer, value in steps:
        params = optimizer.params
        adam = torch.optim.Adam(params, lr=float(optimizer.learning_rates[0]))
        for param in params:
            adam.state[param] = {name: value.clone() for name, value in optimizer.state[param].items()}
        for param, grad in zip(params, torch.autograd.grad(value(), params), strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        adam.step()
    loss.update_targets_(0.005)
    for (key, ours), theirs in zip(trainer.loss.state_dict().items(), loss.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=key)


def test_the_actor_and_the_targets_move_at_every_third_update():
    trainer = run(make("td3", {"updates_per_iteration": 6, "policy_delay": 3}), 2)
    loss = trainer.loss
    modules = {"critic": loss.critic, "actor": loss.actor, "target": loss.target_critic, "slow": loss.target_actor}
    moved = []
    for number in range(6):
        before = {name: copies(module) for name, module in modules.items()}
        trainer.update_number = number
        trainer.update(trainer.buffer.sample())
        moved.append({name for name, module in modules.items() if not equal(before[name], copies(module))})
    assert moved == [{"critic"}, {"critic"}, set(modules)] * 2


def test_statistics_of_the_actor_are_means_over_its_own_updates():
    trainer = run(make("td3", {"updates_per_iteration": 4, "policy_delay": 2}), 2)
    seen, gradients = [], trainer.passes.actor

    def watch(*args):
        result = gradients(*args)
        seen.append(float(result.loss))
        return result

    trainer.passes.actor = watch
    trainer.metrics.flush(1)
    run(trainer, 1)
    assert len(seen) == 2
    assert trainer.metrics.flush(2)["train/loss_actor"] == pytest.approx(sum(seen) / 2, rel=1e-5)


class TestNoise:
    def test_its_scale_falls_and_stays(self):
        trainer = make("ddpg", {"noise_start": 0.5, "noise_end": 0.1, "noise_frames": 64})
        for iteration in range(1, 8):
            run(trainer, 1)
            assert float(trainer.policy.sigma) == pytest.approx(0.5 - 0.4 * min(iteration / 4, 1), rel=1e-5)

    @pytest.mark.parametrize(("noise", "kind"), [("gaussian", GaussianNoise), ("ou", OUNoise)])
    def test_kind(self, noise, kind):
        trainer = run(make("ddpg", {"noise": noise}), 3)
        assert type(trainer.policy) is kind
        assert trainer.policy.policy is trainer.loss.actor

    def test_without_it_actions_are_the_actors(self):
        trainer = run(make("ddpg", {"noise_start": 0.0, "noise_end": 0.0}), 1)
        batch = trainer.collect()
        expected = trainer.loss.actor.action(batch["observation"])
        torch.testing.assert_close(batch["action"], expected)


class TestGivenParts:
    def test_the_policy_of_a_collector_is_trained(self):
        env = Pendulum(4)
        config = KINDS["td3"](**SMALL["td3"])
        actor = make_deterministic_actor(env.observation_spec["observation"], env.action_spec, config)
        policy = GaussianNoise(actor, sigma_start=0.3)
        collector = DeviceCollector(env, policy, frames_per_batch=16, init_random_frames=16)
        for options in ({}, {"actor": actor}):
            trainer = run(DDPGTrainer(config, collector=collector, **options), 3)
            assert trainer.policy is policy
            assert trainer.loss.actor is actor

    def test_another_actor_is_refused(self):
        first = make("ddpg", {})
        with pytest.raises(ValueError, match="collector: expected it to act with the trainer's policy"):
            make("ddpg", {}, collector=first.collector, env=first.env, actor=make("ddpg", {}).loss.actor)

    @pytest.mark.parametrize("noise", ["gaussian", "ou"])
    def test_a_host_collector(self, noise):
        options = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        envs = gymnasium.make_vec("Pendulum-v1", 4, vectorization_mode="sync", vector_kwargs=options)
        space = envs.single_action_space
        spec = Bounded(torch.as_tensor(space.low).expand(4, 1), torch.as_tensor(space.high).expand(4, 1))
        config = KINDS["ddpg"](**SMALL["ddpg"])
        actor = make_deterministic_actor(Unbounded((4, 3)), spec, config)
        # such a collector does not tell where episodes begin
        policy = OUNoise(actor, keys={"is_init": None}) if noise == "ou" else GaussianNoise(actor)
        collector = HostCollector(envs, policy, frames_per_batch=16, init_random_frames=16, seed=0)
        trainer = run(DDPGTrainer(config, collector=collector), 4)
        assert int(trainer.updates) == 6
        assert trainer.policy is policy
        trainer.close()


@pytest.mark.parametrize("name", NAMES)
def test_discrete_actions_are_refused(name):
    with pytest.raises(ValueError, match=r"expected continuous actions.*Remedy: EpsilonGreedy"):
        make(name, {}, env=CartPole(4))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ddpg", "noise", "white"),
        ("ddpg", "noise_start", -0.1),
        ("ddpg", "noise_frames", 0),
        ("ddpg", "loss_function", "l1"),
        ("ddpg", "tau", 1.5),
        ("td3", "num_critics", 0),
        ("td3", "policy_delay", 0),
        ("td3", "policy_delay", 3),
        ("td3", "target_noise", -1.0),
        ("ac-iqn", "kappa", -1.0),
        ("ac-iqn", "num_taus", 0),
        ("ac-iqn", "num_actor_taus", 0),
        ("ac-iqn", "dropped_target_taus", -1),
    ],
)
def test_the_field_is_named(name, field, value):
    with pytest.raises(ValueError, match=rf"{field}: expected .*received {value!r}"):
        KINDS[name].without_task(**{**SMALL[name], field: value})
