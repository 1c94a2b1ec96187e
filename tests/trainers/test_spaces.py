"""Default networks on envs with several observations, other keys and several choices: built, or refused by name."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from torchrl.envs import DoubleToFloat, EnvBase, TransformedEnv

from torchrl_perf.modules import EpsilonGreedy, HybridActor, IndependentCategoricals, JoinedInputs
from torchrl_perf.modules.encoders.observations import ObservationEncoder
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import (
    ACIQNConfig,
    ACIQNTrainer,
    DDPGConfig,
    DDPGTrainer,
    DQNConfig,
    DQNTrainer,
    HybridPPOConfig,
    HybridPPOTrainer,
    IQNConfig,
    IQNTrainer,
    PPOConfig,
    PPOTrainer,
    SACConfig,
    SACTrainer,
    make_actor,
)
from torchrl_perf.trainers.spaces import action_choices, observation_inputs

N = 4
COMMON = {"num_envs": N, "num_steps": 4, "total_steps": 32, "device": "cpu", "logger": "none", "hidden_size": 32}
ON = {**COMMON, "epochs": 1, "minibatches": 2, "mode": "eager"}
OFF = {**COMMON, "capacity": 64, "learning_starts": 16, "minibatch_size": 8, "mode": "eager"}


def observations(kind):
    vector = {"a": Unbounded((N, 2)), "b": Unbounded((N, 3))}
    return {
        "plain": {"observation": Unbounded((N, 3))},
        "renamed": {"state": Unbounded((N, 3)), "mask": Binary(shape=(N, 5), dtype=torch.bool)},
        "several": {"z": Unbounded((N, 1)), **vector, "count": Unbounded((N, 1), dtype=torch.int64)},
        "nested": {"observation": Composite(vector, shape=(N,)), "extra": Unbounded((N, 7))},
        "deep": {"agent": Composite(vector, shape=(N,)), "z": Unbounded((N, 1))},
        "picture": {"observation": Unbounded((N, 3, 8, 8))},
        "number": {"observation": Categorical(5, shape=(N,))},
    }[kind]


class Toy(EnvBase):
    """Random observations of any spec; an episode of five steps; the reward is 1 where the first choice is 1."""

    def __init__(self, kind="plain", action=None):
        super().__init__(batch_size=[N], device="cpu")
        self.observation_spec = Composite(observations(kind), shape=(N,))
        self.action_spec = Categorical(3, shape=(N,)) if action is None else action
        self.reward_spec = Unbounded((N, 1))
        self.time = torch.zeros(N, 1, dtype=torch.int64)

    def _observe(self):
        return self.observation_spec.rand()

    def _reset(self, tensordict):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.time = self.time * 0 if mask is None else torch.where(mask.view(N, 1), 0, self.time)
        return self._observe()

    def _step(self, tensordict):
        self.time = self.time + 1
        action = tensordict.get("action").reshape(N, -1)[:, :1]
        done = self.time >= 5
        rest = {"reward": (action == 1).float(), "done": done, "terminated": done}
        return TensorDict({**dict(self._observe().items()), **rest}, [N])

    def _set_seed(self, seed):
        pass


def multi(*sizes):
    return MultiCategorical(torch.tensor(sizes).expand(N, len(sizes)), shape=(N, len(sizes)))


@pytest.mark.parametrize(
    ("kind", "keys", "size"),
    [
        ("plain", ["observation"], 3),
        ("renamed", ["state"], 3),
        ("several", ["a", "b", "z"], 6),
        ("nested", [("observation", "a"), ("observation", "b")], 5),
        ("deep", [("agent", "a"), ("agent", "b"), "z"], 6),
    ],
)
def test_what_is_read_and_in_which_order(kind, keys, size):
    env = Toy(kind)
    assert observation_inputs(env) == (keys, size, ())
    trainer = PPOTrainer(PPOConfig(**ON), env=env)
    assert isinstance(trainer.critic.module, JoinedInputs) is (len(keys) > 1)
    assert trainer.critic.in_keys == keys
    trainer.step()
    joined = torch.cat([trainer.collector.collect().get(key) for key in keys], -1)
    assert joined.shape[-1] == size
    trainer.close()


@pytest.mark.parametrize("kind", ["renamed", "several", "nested", "deep"])
def test_dqn_reads_the_same(kind):
    trainer = DQNTrainer(DQNConfig(**OFF), env=Toy(kind))
    assert isinstance(trainer.policy, EpsilonGreedy)
    assert trainer.policy.network_keys == observation_inputs(Toy(kind)).keys
    for _ in range(3):
        trainer.step()
    trainer.close()


def test_several_choices():
    trainer = PPOTrainer(PPOConfig(**ON), env=Toy("several", multi(3, 2, 4)))
    batch = trainer.collector.collect()
    assert batch["action"].shape == (N, 4, 3)
    assert batch["action"].dtype == torch.int64
    assert (batch["action"] < torch.tensor([3, 2, 4])).all()
    trainer.step()
    kl = PPOTrainer(PPOConfig(**ON, kl_estimate="closed_form"), env=Toy("plain", multi(2, 2)))
    kl.step()
    for each in (trainer, kl):
        each.close()


@pytest.mark.parametrize("kind", ["picture", "number"])
@pytest.mark.parametrize(
    ("trainer", "config", "options"),
    [
        (PPOTrainer, PPOConfig, ON),
        (DQNTrainer, DQNConfig, OFF),
        (IQNTrainer, IQNConfig, OFF),
        (SACTrainer, SACConfig, OFF),
    ],
)
def test_images_and_indices_are_encoded(kind, trainer, config, options):
    action = Bounded(-torch.ones(N, 2), torch.ones(N, 2)) if trainer is SACTrainer else None
    made = trainer(config(**options), env=Toy(kind, action))
    before = [value.clone() for value in made.policy.parameters()]
    assert any(isinstance(module, ObservationEncoder) for module in made.policy.modules())
    for _ in range(4):
        made.step()
    assert not all(torch.equal(one, other) for one, other in zip(before, made.policy.parameters(), strict=True))
    made.close()


@pytest.mark.parametrize(("trainer", "config", "options"), [(PPOTrainer, PPOConfig, ON), (DQNTrainer, DQNConfig, OFF)])
def test_flags_and_counts_alone_are_refused(trainer, config, options):
    env = Toy("plain")
    env.observation_spec = Composite(
        count=Unbounded((N, 1), dtype=torch.int64), ready=Binary(shape=(N, 1), dtype=torch.bool), shape=(N,)
    )
    with pytest.raises(ValueError, match=r"observation_spec: expected numbers, an image or indices.*received.*Remedy"):
        trainer(config(**options), env=env)


@pytest.mark.parametrize(
    ("trainer", "config"), [(SACTrainer, SACConfig), (DDPGTrainer, DDPGConfig), (IQNTrainer, IQNConfig)]
)
@pytest.mark.parametrize("kind", ["several", "nested", "deep", "renamed"])
def test_other_algorithms_read_several_too(trainer, config, kind):
    action = None if trainer is IQNTrainer else Bounded(-torch.ones(N, 2), torch.ones(N, 2))
    made = trainer(config(**OFF), env=Toy(kind, action))
    for _ in range(3):
        made.step()
    made.close()


@pytest.mark.parametrize("kind", ["several", "nested", "deep", "renamed", "picture"])
def test_a_network_of_one_input_refuses_others(kind):
    action = Bounded(-torch.ones(N, 2), torch.ones(N, 2))
    with pytest.raises(ValueError, match=r"observation_spec: expected one vector.*CatTensors"):
        ACIQNTrainer(ACIQNConfig(**OFF), env=Toy(kind, action))


def test_one_key_of_another_name():
    trainer = IQNTrainer(IQNConfig(**OFF), env=Toy("renamed"))
    for _ in range(3):
        trainer.step()
    trainer.close()


@pytest.mark.parametrize(
    "action", [multi(3, 2), MultiOneHot([3, 2], shape=(N, 5)), Bounded(-torch.ones(N, 2), torch.ones(N, 2))]
)
def test_action_values_are_of_one_choice(action):
    for trainer, config in ((DQNTrainer, DQNConfig), (IQNTrainer, IQNConfig)):
        with pytest.raises(ValueError, match=rf"action_spec: expected discrete.*one choice.*{type(action).__name__}"):
            trainer(config(**OFF), env=Toy("plain", action))


@pytest.mark.parametrize(
    "action",
    [
        OneHot(3, shape=(N, 3)),
        MultiOneHot([3, 2], shape=(N, 5)),
        Binary(shape=(N, 3)),
        MultiCategorical(torch.tensor([[3, 2], [3, 2], [3, 2], [2, 2]]), shape=(N, 2)),
    ],
)
def test_other_actions_are_refused_with_a_remedy(action):
    with pytest.raises(ValueError, match=r"(?s)action_spec: expected .*received.*Remedy: pass actor="):
        PPOTrainer(PPOConfig(**ON), env=Toy("plain", action))


def test_actions_without_bounds():
    trainer = PPOTrainer(PPOConfig(**ON), env=Toy("plain", Unbounded((N, 2))))
    trainer.step()
    assert trainer.collector.collect()["action"].shape == (N, 4, 2)
    trainer.close()


def test_ppo_acts_on_several_parts():
    parts = Composite(kind=Categorical(3, shape=(N,)), push=Bounded(-torch.ones(N, 2), torch.ones(N, 2)), shape=(N,))
    assert isinstance(make_actor(Toy("plain", Composite(action=parts, shape=(N,))), PPOConfig(**ON)), HybridActor)


def test_actions_of_several_parts():
    parts = Composite(kind=Categorical(3, shape=(N,)), push=Bounded(-torch.ones(N, 2), torch.ones(N, 2)), shape=(N,))
    whole = Composite(action=parts, shape=(N,))
    with pytest.raises(ValueError, match=r"one action under the key 'action'.*HybridActor"):
        action_choices(Toy("plain", whole))
    several = Composite(action=multi(3, 2), push=Unbounded((N, 1)), shape=(N,))
    with pytest.raises(ValueError, match=r"MultiCategorical at 'action'"):
        HybridPPOTrainer(HybridPPOConfig(**ON), env=Toy("plain", several))


@pytest.mark.parametrize(
    ("trainer", "config"), [(SACTrainer, SACConfig), (DDPGTrainer, DDPGConfig), (ACIQNTrainer, ACIQNConfig)]
)
def test_continuous_actions_of_another_key_or_dtype(trainer, config):
    parts = Composite(kind=Categorical(3, shape=(N,)), amount=Bounded(-1.0, 1.0, (N, 2)), shape=(N,))
    with pytest.raises(ValueError, match=r"action_spec: expected one action under the key 'action'.*HybridActor"):
        trainer(config(**OFF), env=Toy(action=Composite(action=parts, shape=(N,))))
    double = Toy(action=Bounded(-1.0, 1.0, (N, 2), dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected actions of torch\.float32.*received torch\.float64.*DoubleToFloat"):
        trainer(config(**OFF), env=double)
    made = trainer(config(**OFF), env=TransformedEnv(double, DoubleToFloat(in_keys_inv=["action"])))
    for _ in range(2):
        made.step()
    made.close()


class TestIndependentCategoricals:
    def test_equals_torchs_categoricals(self):
        logits, sizes = torch.randn(6, 9, dtype=torch.float64), (3, 2, 4)
        other = torch.randn(6, 9, dtype=torch.float64)
        ours, ours_other = IndependentCategoricals(logits, sizes), IndependentCategoricals(other, sizes)
        theirs = [torch.distributions.Categorical(logits=part) for part in logits.split(sizes, -1)]
        theirs_other = [torch.distributions.Categorical(logits=part) for part in other.split(sizes, -1)]
        with no_host_sync():
            action = ours.sample((5,))
        assert action.shape == (5, 6, 3)
        want = sum(part.log_prob(action[..., d]) for d, part in enumerate(theirs))
        torch.testing.assert_close(ours.log_prob(action), want)
        torch.testing.assert_close(ours.entropy(), sum(part.entropy() for part in theirs))
        kl = torch.distributions.kl_divergence
        want = sum(kl(p, q) for p, q in zip(theirs, theirs_other, strict=True))
        torch.testing.assert_close(kl(ours, ours_other), want)
        assert (ours.mode == torch.stack([part.logits.argmax(-1) for part in theirs], -1)).all()
        wide = ours.expand((2, 6))
        torch.testing.assert_close(wide.log_prob(ours.mode), ours.log_prob(ours.mode).expand(2, 6))

    def test_frequencies(self):
        logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0, 0.0, 0.0, 0.0])
        dist = IndependentCategoricals(logits, (3, 4))
        draws = dist.sample((40_000,))
        for d, size in enumerate((3, 4)):
            shares = torch.bincount(draws[:, d], minlength=size) / len(draws)
            torch.testing.assert_close(shares, dist.logits[d].exp()[:size], atol=0.01, rtol=0)

    def test_gradient_is_finite(self):
        logits = torch.randn(4, 5, requires_grad=True)
        dist = IndependentCategoricals(logits, (3, 2))
        (dist.entropy().sum() + dist.log_prob(dist.mode).sum()).backward()
        assert logits.grad.isfinite().all()

    def test_columns_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"logits: expected 5 columns.*received \[4, 6\]"):
            IndependentCategoricals(torch.zeros(4, 6), (3, 2))
