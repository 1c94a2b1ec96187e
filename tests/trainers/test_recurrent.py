"""Networks with memory are refused wherever single steps are shuffled, however the memory is there."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs import TransformedEnv
from torchrl.modules import GRUModule, LSTMModule, ValueOperator

from torchrl_perf.envs import CartPole, Ferry, HybridTarget, Pendulum
from torchrl_perf.modules import EpsilonGreedy
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
    QRDQNConfig,
    RainbowConfig,
    RainbowTrainer,
    SACConfig,
    SACOptionsConfig,
    SACOptionsTrainer,
    SACTrainer,
    TD3Config,
    minibatches,
)  # fmt: skip
from torchrl_perf.trainers.recurrent import recurrence_of
from torchrl_perf.transforms import PolicyState

N, T = 4, 4
ALL = {"num_envs": N, "num_steps": T, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 32}
REPLAY = {**ALL, "capacity": 64, "minibatch_size": 16, "learning_starts": 16, "updates_per_iteration": 2}
WORKS = r"learns from single steps in random order, received .*Remedy: a network of what one row holds, .*or a loop"


class Own(nn.Module):
    """A cell of one's own: no module of torch that is known to be recurrent."""

    def __init__(self, size):
        super().__init__()
        self.mix = nn.Linear(size + 3, 3)

    def forward(self, observation, memory):
        memory = self.mix(torch.cat([observation, memory], -1)).tanh()
        return memory, memory


class Wrapped(nn.Module):
    """A recurrent part deep inside of an ordinary network."""

    def __init__(self, cell, size):
        super().__init__()
        self.net = nn.ModuleDict({"cell": cell, "out": nn.Linear(size, 8)})

    def forward(self, *inputs):
        out = self.net["cell"](inputs[0])
        return self.net["out"](out[0] if isinstance(out, tuple) else out)


def features(kind, size):
    """A TensorDict module from "observation" to "features [*, 8]" that carries state in one of many ways."""
    if kind in ("LSTMModule", "GRUModule"):
        module = LSTMModule if kind == "LSTMModule" else GRUModule
        return module(input_size=size, hidden_size=8, in_key="observation", out_key="features")
    if kind == "next":
        cell = TensorDictModule(Own(size), ["observation", "memory"], ["hidden", ("next", "memory")])
        return TensorDictSequential(cell, TensorDictModule(nn.Linear(3, 8), ["hidden"], ["features"]))
    return TensorDictModule(Wrapped(getattr(nn, kind)(size, 8), 8), ["observation"], ["features"])


KINDS = ["LSTMModule", "GRUModule", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "next"]


def plain(size):
    return TensorDictModule(nn.Linear(size, 8), ["observation"], ["features"])


def actor(part, actions=2):
    head = TensorDictModule(nn.Linear(8, actions), ["features"], ["logits"])
    dist = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(part, head, dist)


def deterministic(part):
    return TensorDictSequential(part, TensorDictModule(nn.Linear(8, 1), ["features"], ["action"]))


def value(part, key):
    return TensorDictSequential(part, TensorDictModule(nn.Linear(8, 1), ["features"], [key]))


class TestFound:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_way_to_carry_state(self, kind):
        assert recurrence_of(features(kind, 4))
        assert recurrence_of(actor(features(kind, 4)))
        assert recurrence_of(nn.ModuleList([nn.Linear(1, 1), value(features(kind, 4), "state_value")]))

    def test_nothing_where_there_is_nothing(self):
        assert not recurrence_of(actor(plain(4)))
        # writes what no network reads, and reads what is of the step itself
        assert not recurrence_of(TensorDictModule(nn.Linear(4, 1), ["observation"], [("next", "reward")]))
        assert not recurrence_of(TensorDictModule(nn.Linear(4, 1), [("next", "observation")], ["value"]))

    def test_nested_keys_and_lists(self):
        cell = TensorDictModule(Own(4), ["observation", ("agents", "h")], ["hidden", ("next", "agents", "h")])
        assert "('agents', 'h')" in recurrence_of(cell)
        assert not recurrence_of(cell, own_state=[("agents", "h")])


@pytest.mark.parametrize("kind", KINDS)
class TestTrainers:
    @pytest.mark.parametrize("place", ["actor", "critic"])
    def test_ppo(self, kind, place):
        parts = {"actor": actor(features(kind, 4)), "critic": value(features(kind, 4), "state_value")}
        with pytest.raises(ValueError, match=f"^{place}: expected a network without memory, since PPOTrainer {WORKS}"):
            PPOTrainer(PPOConfig(**ALL, minibatches=2), env=CartPole(N, device="cpu"), **{place: parts[place]})

    def test_hybrid_ppo(self, kind):
        critic = value(
            features(kind, HybridTarget(N, device="cpu").observation_spec["observation"].shape[-1]), "state_value"
        )
        with pytest.raises(ValueError, match=f"^critic: .*since HybridPPOTrainer {WORKS}"):
            HybridPPOTrainer(HybridPPOConfig(**ALL, minibatches=2), critic=critic)

    @pytest.mark.parametrize(
        ("trainer", "config"),
        [(DQNTrainer, DQNConfig), (IQNTrainer, IQNConfig), (IQNTrainer, QRDQNConfig), (RainbowTrainer, RainbowConfig)],
    )
    def test_values_of_discrete_actions(self, kind, trainer, config):
        env = CartPole(N, device="cpu")
        network = Wrapped(getattr(nn, kind)(4, 8), 8) if hasattr(nn, kind) else features(kind, 4)
        policy = EpsilonGreedy(network, spec=env.action_spec)
        with pytest.raises(ValueError, match=f"^policy: .*since {trainer.__name__} {WORKS}"):
            trainer(config(**REPLAY), env=env, policy=policy)

    @pytest.mark.parametrize(
        ("trainer", "config"),
        [(SACTrainer, SACConfig), (DDPGTrainer, DDPGConfig), (DDPGTrainer, TD3Config), (ACIQNTrainer, ACIQNConfig)],
    )
    @pytest.mark.parametrize("place", ["actor", "critic"])
    def test_continuous_actions(self, kind, trainer, config, place):
        parts = {"actor": deterministic(features(kind, 3)), "critic": value(features(kind, 3), "state_action_value")}
        with pytest.raises(ValueError, match=f"^{place}: .*since {trainer.__name__} {WORKS}"):
            trainer(config(**REPLAY), env=Pendulum(N, device="cpu"), **{place: parts[place]})

    def test_options(self, kind):
        critic = value(
            features(kind, Ferry(1, device="cpu").observation_spec["observation"].shape[-1]), "state_action_value"
        )
        with pytest.raises(ValueError, match=f"^critic: .*since SACOptionsTrainer {WORKS}"):
            SACOptionsTrainer(SACOptionsConfig(**REPLAY, option_capacity=16), critic=critic)


class TestState:
    """The state is the env's: a primer's, or one of the package's own transform."""

    def transforms(self):
        lstm = LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="features")
        from torchrl.data import Unbounded
        from torchrl.envs import Compose, RewardSum, TensorDictPrimer

        memory = TensorDictPrimer(memory=Unbounded(shape=(N, 3)), expand_specs=False)
        yield "recurrent_state_h", lstm.make_tensordict_primer()
        yield "memory", memory
        yield "memory", Compose(RewardSum(), Compose(TensorDictPrimer(memory=Unbounded(shape=(3,)), expand_specs=True)))
        yield "memory", PolicyState({"memory": Unbounded(shape=(3,))})

    def test_a_network_that_reads_it_is_refused(self):
        for key, transform in self.transforms():
            env = TransformedEnv(CartPole(N, device="cpu"), transform)
            reads = TensorDictModule(lambda state: state[..., :1], [key], ["state_value"])
            with pytest.raises(ValueError, match=f"^critic: .* reads '{key}', state that the env's .* carries"):
                PPOTrainer(PPOConfig(**ALL, minibatches=2), env=env, critic=reads)

    def test_state_that_nothing_reads_harms_nobody(self):
        from torchrl.data import Unbounded

        env = TransformedEnv(CartPole(N, device="cpu"), PolicyState({"memory": Unbounded(shape=(3,))}))
        PPOTrainer(PPOConfig(**ALL, minibatches=2), env=env).close()

    def test_options_are_state_that_their_trainer_learns_from(self):
        trainer = SACOptionsTrainer(SACOptionsConfig(**REPLAY, option_capacity=16))
        again = SACOptionsTrainer(trainer.config, env=trainer.env, policy=trainer.policy)
        again.close()


def test_rows_with_the_state_of_a_recurrent_module_are_not_shuffled():
    batch = TensorDict(
        {"observation": torch.zeros(N, T, 4), "recurrent_state_h": torch.zeros(N, T, 1, 8)}, [N, T], device="cpu"
    )
    with pytest.raises(ValueError, match=r"^minibatches: expected rows that stand alone, .*'recurrent_state_h'"):
        next(minibatches(batch, epochs=1, parts=2))
    assert len(list(minibatches(batch.exclude("recurrent_state_h"), epochs=1, parts=2))) == 2


def test_the_loop_that_the_remedy_names_starts_at_a_divergence_of_0():
    from torchrl.modules import set_recurrent_mode
    from torchrl.objectives import ClipPPOLoss

    from torchrl_perf.collectors import DeviceCollector
    from torchrl_perf.transforms import GAETransform

    lstm = features("LSTMModule", 4)
    env = TransformedEnv(CartPole(N, device="cpu"), lstm.make_tensordict_primer())
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    policy = actor(lstm)
    batch = DeviceCollector(env, policy, frames_per_batch=N * T, total_frames=N * T, mode="eager").collect()
    GAETransform(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    with set_recurrent_mode(True):
        assert abs(ClipPPOLoss(policy, critic)(batch)["kl_approx"].item()) < 1e-7
