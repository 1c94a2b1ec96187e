"""Exploration called as TorchRL's: after a policy, in its collector, with its names; ensembles as its Q networks."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss

from torchrl_perf.modules import DeterministicActor, EpsilonGreedy, GaussianNoise, OUNoise
from torchrl_perf.runtime import no_host_sync

ROWS = 4_000
PLAIN = {"auto_register_policy_transforms": False}


def one_hot(index, size):
    return nn.functional.one_hot(index, size)


KINDS = {
    "index": (Categorical(3), torch.zeros(ROWS, dtype=torch.int64), [1 / 3] * 3),
    "column": (Categorical(3), torch.zeros(ROWS, 1, dtype=torch.int64), [1 / 3] * 3),
    "one-hot": (OneHot(3), one_hot(torch.zeros(ROWS, dtype=torch.int64), 3).bool(), [1 / 3] * 3),
    "several": (MultiCategorical([2, 3]), torch.zeros(ROWS, 2, dtype=torch.int64), [1 / 2, 1 / 3]),
    "several one-hot": (MultiOneHot([2, 3]), torch.tensor([1, 0, 1, 0, 0]).bool().expand(ROWS, 5), [1 / 2, 1 / 3]),
    "bits": (Binary(2), torch.zeros(ROWS, 2, dtype=torch.int8), [1 / 2, 1 / 2]),
}


def explored(module, **entries):
    with set_exploration_type(ExplorationType.RANDOM), no_host_sync():
        return module(TensorDict(entries, [ROWS]))["action"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_a_policys_actions_is_random(kind):
    spec, action, shares = KINDS[kind]
    torch.manual_seed(0)
    module = EpsilonGreedy(spec, 0.5)
    got = explored(module, action=action)
    assert got.dtype == action.dtype and got.shape == action.shape
    if kind == "column":
        got = got.squeeze(-1)
    elif kind == "one-hot":
        assert (got.sum(-1) == 1).all()
        got = got.to(torch.uint8).argmax(-1)
    elif kind == "several one-hot":
        assert (got[:, :2].sum(-1) == 1).all() and (got[:, 2:].sum(-1) == 1).all()
        got = torch.stack([got[:, :2].int().argmax(-1), got[:, 2:].int().argmax(-1)], -1)
    if got.ndim == 1:
        counts = [float((got == i).float().mean()) for i in range(3)]
        assert counts == pytest.approx([0.5 + shares[0] / 2, shares[1] / 2, shares[2] / 2], abs=0.04)
    else:  # the greedy answer is 0 in each part
        zeros = (got == 0).float().mean(0)
        assert zeros.tolist() == pytest.approx([0.5 + share / 2 for share in shares], abs=0.04)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(module(TensorDict({"action": action}, [ROWS]))["action"], action)


@pytest.mark.parametrize("positional", [False, True])
def test_the_schedule_is_torchrls(positional):
    spec = Categorical(3)
    args = (0.9, 0.1, 10)
    if positional:
        ours, theirs = EpsilonGreedy(spec, *args), EGreedyModule(spec, *args)
    else:
        names = dict(zip(("eps_init", "eps_end", "annealing_num_steps"), args, strict=True))
        ours, theirs = EpsilonGreedy(spec=spec, **names), EGreedyModule(spec=spec, **names)
    for frames in (1, 4, 3, 9):
        ours.step(frames)
        theirs.step(frames)
        torch.testing.assert_close(ours.eps, theirs.eps)
    default, reference = EpsilonGreedy(spec), EGreedyModule(spec)
    assert float(default.eps) == float(reference.eps) and float(default.eps_end) == pytest.approx(0.1)
    assert int(default.annealing_num_steps) == reference.annealing_num_steps
    assert isinstance(default.spec, Composite) and default.in_keys == reference.in_keys == ["action"]


def test_masks_and_nested_keys():
    mask = torch.tensor([True, False, True]).expand(ROWS, 3)
    for spec, action in ((Categorical(3), KINDS["index"][1]), (OneHot(3), KINDS["one-hot"][1])):
        got = explored(EpsilonGreedy(spec, 1.0, action_mask_key="mask"), action=action, mask=mask)
        index = got if got.ndim == 1 else got.int().argmax(-1)
        assert not (index == 1).any() and (index == 2).any()
    key = ("agents", "action")
    module = EpsilonGreedy(Composite(agents=Composite(action=Categorical(3))), 1.0, action_key=key)
    td = TensorDict({key: torch.zeros(ROWS, 2, dtype=torch.int64)}, [ROWS])
    with set_exploration_type(ExplorationType.RANDOM):
        assert {0, 1, 2} == set(module(td)[key].unique().tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpsilonGreedy(Bounded(-1, 1, (2,))), "spec: expected Categorical"),
        (lambda: EpsilonGreedy(nn.Linear(2, 4), spec=MultiOneHot([2, 2])), "spec: expected Categorical"),
        (lambda: EpsilonGreedy(Binary(3), action_mask_key="mask"), "action_mask_key: expected None"),
        (lambda: EpsilonGreedy(Composite(other=Categorical(3))), "spec: expected 'action' in the Composite"),
        (lambda: EpsilonGreedy(Categorical(3), 1.5), r"expected a probability in \[0, 1\]"),
        (lambda: GaussianNoise(Categorical(3)), "spec: expected that of continuous actions"),
        (lambda: GaussianNoise(Bounded(-1, 1, (2,)), std=-1.0), "finite std of at least 0"),
        (lambda: OUNoise(Bounded(-1, 1, (2,)), mu=1.0), "mu, sigma: expected 0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_that_do_not_fit():
    td = TensorDict({"observation": torch.zeros(3, 2), "action": torch.zeros(3, 4)}, [3])
    with pytest.raises(ValueError, match=r"network: expected values \[\*, 3\]"):
        EpsilonGreedy(nn.Linear(2, 4), spec=Categorical(3))(td)
    with set_exploration_type(ExplorationType.RANDOM), pytest.raises(ValueError, match=r"action: expected \[\*, 3\]"):
        EpsilonGreedy(OneHot(3))(td)
    with pytest.raises(TypeError, match=r"received \['epsilon'\]"):
        EpsilonGreedy(Categorical(3), epsilon=0.1)


def test_gaussian_noise_after_a_policy_is_in_the_unit_of_actions():
    torch.manual_seed(0)
    module = GaussianNoise(Bounded(-10, 10, (2,)), 0.5, 0.5, mean=1.0, std=2.0)
    got = explored(module, action=torch.zeros(ROWS, 2))
    assert float(got.mean()) == pytest.approx(0.5, abs=0.06) and float(got.std()) == pytest.approx(1.0, abs=0.06)
    wide = explored(GaussianNoise(Bounded(-0.1, 0.1, (2,))), action=torch.zeros(ROWS, 2, dtype=torch.bfloat16))
    assert wide.dtype == torch.bfloat16 and (wide.abs() <= 0.1001).all()


def policies(name, spec):
    values = QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=spec) if name == "follows" else None
    if name == "network":
        return EpsilonGreedy(nn.Linear(4, 2), spec=spec)
    return TensorDictSequential(values, EpsilonGreedy(spec, 1.0, 0.5, 50))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["network", "follows"])
@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_actions_in_torchrls_collector(name, categorical):
    from torchrl.collectors import Collector

    env = GymEnv("CartPole-v1", categorical_action_encoding=categorical)
    collector = Collector(env, policies(name, env.action_spec), frames_per_batch=16, total_frames=32, **PLAIN)
    batches = [batch["action"] for batch in collector]
    collector.shutdown()
    assert len(batches) == 2 and all(batch.shape == ((16,) if categorical else (16, 2)) for batch in batches)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_values_in_torchrls_collector_are_those_of_the_actions(exploration):
    """All ``out_keys`` are written at each step: a collector that made room for them would keep zeros."""
    from torchrl.collectors import Collector

    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    policy = EpsilonGreedy(nn.Linear(4, 2), 0.5, 0.5, spec=env.action_spec)
    collector = Collector(env, policy, frames_per_batch=32, total_frames=32, exploration_type=exploration, **PLAIN)
    (batch,) = list(collector)
    collector.shutdown()
    with torch.no_grad():
        values = policy.network(batch["observation"])
    torch.testing.assert_close(batch["action_value"], values)
    torch.testing.assert_close(batch["chosen_action_value"], values.gather(-1, batch["action"].unsqueeze(-1)))
    for kind in (ExplorationType.RANDOM, ExplorationType.MODE):
        with set_exploration_type(kind):
            loss = DQNLoss(policy, action_space=policy.action_space, delay_value=False)(batch)["loss"]
        assert loss.requires_grad  # and is no loss of values that were stored


def test_values_can_be_left_out():
    policy = EpsilonGreedy(nn.Linear(4, 2), spec=Categorical(2), write_values=False)
    for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
        with set_exploration_type(kind):
            td = policy(TensorDict({"observation": torch.randn(3, 4)}, [3]))
        assert set(td.keys()) == {"observation", "action"} and policy.out_keys == ["action"]
    assert EpsilonGreedy(Categorical(2)).out_keys == ["action"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [None, GaussianNoise, OUNoise])
@pytest.mark.parametrize("follows", [False, True])
def test_continuous_actions_in_torchrls_collector(kind, follows):
    from torchrl.collectors import Collector

    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    actor = DeterministicActor(nn.Linear(3, 1), spec=env.action_spec)
    if kind is None:
        policy = actor if follows else TensorDictModule(actor, ["observation"], ["action"]).module
    else:
        policy = TensorDictSequential(actor, kind(env.action_spec)) if follows else kind(actor)
    collector = Collector(env, policy, frames_per_batch=16, total_frames=16, **PLAIN)
    (batch,) = list(collector)
    collector.shutdown()
    assert (batch["action"].abs() <= 2).all() and isinstance(actor.spec, Composite)


def test_ou_noise_without_the_start_of_episodes():
    with set_exploration_type(ExplorationType.RANDOM), pytest.raises(KeyError, match="InitTracker"):
        OUNoise(Bounded(-1, 1, (3, 2)))(TensorDict({"action": torch.zeros(3, 2)}, [3]))
