"""Small networks, batches and losses that several tests of losses use."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, OneHot
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    SACLoss,
    SoftUpdate,
    ValueEstimators,
)

from torchrl_perf.modules import (
    CategoricalMLP,
    EnsembleHybridQ,
    EnsembleQ,
    HybridActor,
    ImplicitQuantileCritic,
    QuantileMLP,
    hybrid_features,
)
from torchrl_perf.objectives import (
    ACIQNLoss,
    DeviceC51Loss,
    DeviceDQNLoss,
    DeviceSACLoss,
    DeviceTD3Loss,
    HybridSACLoss,
    QuantileDQNLoss,
)

OBS, ACT, CHOICES, GAMMA = 3, 2, 4, 0.9


class Middle(TanhNormal):
    """Draws the same action each time, so that it matters not in which order a loss draws."""

    def rsample(self, sample_shape=()):
        return self.transforms[0](self.base_dist.base_dist.loc + 0.3 * self.base_dist.base_dist.scale)

    sample = rsample

    def rsample_and_log_prob(self, sample_shape=()):
        action = self.rsample()
        return action, self.log_prob(action)


def make_actor(**options):
    net = nn.Sequential(MLP(OBS, 2 * ACT, num_cells=[8]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=Middle,
        spec=Bounded(-1, 1, (ACT,)),
        return_log_prob=True,
        **options,
    )


def make_policy():
    return TensorDictModule(nn.Sequential(MLP(OBS, ACT, num_cells=[8]), nn.Tanh()), ["observation"], ["action"])


def make_critic(outputs=1):
    return ValueOperator(MLP(OBS + ACT, outputs, num_cells=[8]), in_keys=["observation", "action"])


def make_values(one_hot):
    spec = (OneHot if one_hot else Categorical)(CHOICES)
    return QValueActor(MLP(OBS, CHOICES, num_cells=[8]), in_keys=["observation"], spec=spec)


def make_batch(*shape, actions="continuous", **entries):
    terminated = torch.rand(*shape, 1) < 0.3
    index = torch.randint(CHOICES, shape)
    action = {
        "continuous": torch.rand(*shape, ACT) * 1.8 - 0.9,
        "index": index,
        "one-hot": nn.functional.one_hot(index, CHOICES).bool(),
    }[actions]
    td = TensorDict({"observation": torch.randn(*shape, OBS), "action": action}, shape)
    td["next"] = TensorDict(
        {
            "observation": torch.randn(*shape, OBS),
            "reward": torch.randn(*shape, 1),
            "terminated": terminated,
            "done": terminated | (torch.rand(*shape, 1) < 0.3),
        },
        shape,
    )
    return td.update(entries)


def hybrid():
    spec = Composite(action=Composite(kind=Categorical(CHOICES), push=Bounded(-torch.ones(2), torch.ones(2))))
    actor = HybridActor(nn.Linear(OBS, hybrid_features(spec)), spec=spec)
    critic = TensorDictModule(
        EnsembleHybridQ(2, OBS + 2, CHOICES, hidden_sizes=(8,)), ["observation", ("action", "push")], ["q"]
    )
    return actor, critic


LOSSES = {
    "sac": (lambda **o: DeviceSACLoss(make_actor(), make_critic(), **o), "continuous"),
    "sac-ensemble": (lambda **o: DeviceSACLoss(make_actor(), EnsembleQ(3, OBS + ACT), **o), "continuous"),
    "td3": (
        lambda **o: DeviceTD3Loss(make_policy(), make_critic(), bounds=(-1.0, 1.0), policy_noise=0.0, **o),
        "continuous",
    ),
    "ac-iqn": (
        lambda **o: ACIQNLoss(
            make_policy(), ImplicitQuantileCritic(OBS, ACT, hidden_size=8, taus="midpoints"), critic_keys=None, **o
        ),
        "continuous",
    ),
    "dqn": (lambda **o: DeviceDQNLoss(make_values(True), **o), "one-hot"),
    "dqn-tensors": (lambda **o: DeviceDQNLoss(MLP(OBS, CHOICES, num_cells=[8]), **o), "index"),
    "c51": (lambda **o: DeviceC51Loss(CategoricalMLP(OBS, CHOICES, num_atoms=5, v_min=-2.0, v_max=2.0), **o), "index"),
    "quantile": (lambda **o: QuantileDQNLoss(QuantileMLP(OBS, CHOICES, num_quantiles=4), **o), "index"),
    "hybrid": (lambda **o: HybridSACLoss(*hybrid(), **o), "hybrid"),
}


def make(name, shape=(12,), **options):
    torch.manual_seed(0)
    build, actions = LOSSES[name]
    loss = build(**options)
    td = make_batch(*shape, actions="continuous" if actions == "hybrid" else actions)
    if actions == "hybrid":
        push = td.pop("action")
        td["action"] = TensorDict({"kind": torch.randint(CHOICES, shape), "push": push}, shape)
    return loss, td


def total(out):
    return sum(value for key, value in out.items() if key.startswith("loss"))


def gradients(loss, td):
    """The losses and the gradient of their sum, with the same numbers drawn."""
    loss.zero_grad()
    torch.manual_seed(1)
    out = loss(td)
    total(out).backward()
    return out, [param.grad.clone() for param in loss.parameters() if param.grad is not None]


def close(one, other, **options):
    torch.testing.assert_close(one, other, **{"rtol": 1e-5, "atol": 1e-6, **options})


def their_sac(ours, **options):
    torch.manual_seed(0)
    theirs = SACLoss(make_actor(), make_critic(), **options)
    theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    assert theirs.target_entropy == -ACT  # it is lazy
    SoftUpdate(theirs, tau=0.1)
    ours.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    return theirs
