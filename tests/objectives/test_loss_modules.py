"""Off-policy losses as loss modules of TorchRL: values of its losses, updaters, keys, state, rows that count, shapes."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, MultiOneHot, OneHot
from torchrl.modules import MLP, DistributionalQValueActor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    DistributionalDQNLoss,
    DQNLoss,
    HardUpdate,
    LossModule,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    ValueEstimators,
)
from torchrl.objectives.value import TDLambdaEstimator

from torchrl_perf.modules import (
    CategoricalMLP,
    DeterministicActor,
    EnsembleHybridQ,
    EnsembleQ,
    EpsilonGreedy,
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


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    @pytest.mark.parametrize("kind", ["soft", "hard"])
    def test_updaters_move_the_targets_and_an_optimiser_does_not(self, name, kind):
        loss, td = make(name)
        assert isinstance(loss, LossModule)
        updater = SoftUpdate(loss, tau=0.25) if kind == "soft" else HardUpdate(loss, value_network_update_interval=0)
        targets = [value for key, value in loss.named_buffers() if key.startswith("target_")]
        assert targets and not any("target" in key for key, _ in loss.named_parameters())
        before = [value.clone() for value in targets]
        total(loss(td)).backward()
        torch.optim.SGD(loss.parameters(), 0.1).step()
        assert all(map(torch.equal, targets, before))
        updater.step()
        online, inner = loss.online_and_targets()
        share = 0.25 if kind == "soft" else 1.0
        assert any(not torch.equal(one, old) for one, old in zip(inner, online, strict=True)) == (kind == "soft")
        held = {value.data_ptr() for value in targets}
        assert {value.data_ptr() for value in inner} <= held
        by_address = {value.data_ptr(): old for value, old in zip(targets, before, strict=True)}
        for source, target in zip(online, inner, strict=True):
            old = by_address[target.data_ptr()]
            close(target.detach(), old + share * (source.detach() - old))

    def test_views_are_the_parameters(self, name):
        loss, td = make(name)
        names = [key.removesuffix("_params") for key, _ in loss.named_children() if key.endswith("_params")]
        assert names
        for key in names:
            source = getattr(loss, f"{key.removeprefix('target_')}_params")
            assert {id(v) for v in source.values(True, True)} & {id(v) for v in loss.parameters()}
            assert not any(v.requires_grad for v in getattr(loss, f"{key}_params").values(True, True))
        loss.double()
        assert all(v.dtype == torch.float64 for v in loss.parameters())
        for key in names:
            view = getattr(loss, f"{key}_params")
            assert all(v.dtype == torch.float64 for v in view.values(True, True) if v.is_floating_point())
        if name != "ac-iqn":  # whose levels are float32
            out = loss(td.apply(lambda value: value.double() if value.is_floating_point() else value))
            assert all(value.isfinite().all() for value in out.values())

    def test_state_and_copies(self, name):
        loss, td = make(name)
        other, _ = make(name)
        with torch.no_grad():
            for param in loss.parameters():
                param.add_(0.1)
        loss.update_targets_(0.5)
        other.load_state_dict(loss.state_dict())
        twin = copy.deepcopy(loss)
        (expected, grads), (got, _), (copied, also) = gradients(loss, td), gradients(other, td), gradients(twin, td)
        for key in expected.keys():
            close(got[key], expected[key])
            close(copied[key], expected[key])
        close(also, grads)
        HardUpdate(twin, value_network_update_interval=0).step()
        assert all(map(torch.equal, *twin.online_and_targets()))
        assert not all(map(torch.equal, *loss.online_and_targets()))

    def test_rows_that_do_not_count(self, name):
        """Whatever they hold, NaN too, losses, statistics and gradients are those of the other rows alone."""
        loss, td = make(name, valid_key="valid")
        valid = torch.arange(12) % 3 != 0
        td["valid"] = valid
        td["priority_weight"] = torch.rand(12) + 0.1
        expected, grads = gradients(loss, td[valid])
        for nothing in (0.0, torch.nan):
            other = td.clone()
            other["observation"][~valid] = nothing
            other["next", "observation"][~valid] = nothing
            other["next", "reward"][~valid] = nothing
            got, also = gradients(loss, other)
            if name not in ("ac-iqn", "hybrid"):  # these draw numbers for each row
                for key in expected.keys():
                    close(got[key], expected[key])
                close(also, grads)
            assert all(value.isfinite().all() for value in [*got.values(), *also])
            assert (other["td_error"][~valid] == 0).all()

    def test_no_row_counts(self, name):
        loss, td = make(name, valid_key="valid")
        td["valid"] = torch.zeros(12, 1, dtype=torch.bool)
        out, grads = gradients(loss, td)
        assert all((value == 0).all() for key, value in out.items() if key.startswith("loss"))
        assert all((grad == 0).all() for grad in grads)

    def test_a_final_observation_that_is_missing_is_not_bootstrapped_from(self, name):
        loss, td = make(name)
        td["next", "terminated"].zero_()
        td["next", "done"].zero_()
        td["next", "done"][:4] = True
        ended = td.clone()
        ended["next", "terminated"][:4] = True
        td["next", "observation"][:4] = torch.nan
        expected, grads = gradients(loss, ended)
        got, also = gradients(loss, td)
        if name != "hybrid":
            close([got[key] for key in got.keys()], [expected[key] for key in got.keys()])
            close(also, grads)
        assert all(grad.isfinite().all() for grad in also)
        assert td["next", "observation"][:4].isnan().all()

    @pytest.mark.parametrize(
        ("key", "shape"),
        [
            (("next", "reward"), (12, 2)),
            (("next", "reward"), (1,)),
            (("next", "terminated"), (12, 12)),
            ("priority_weight", (12, 2)),
            ("priority_weight", (1, 12)),
            ("steps_to_next_obs", (12, 3)),
        ],
    )
    def test_shapes_that_would_broadcast(self, name, key, shape):
        loss, td = make(name)
        td.batch_size = []
        value = torch.ones(shape, dtype=torch.bool if "terminated" in key else torch.float32)
        td["next"].batch_size = []
        td[key] = value
        td.batch_size = [12] if shape[0] == 12 else []
        if shape[0] == 12:
            with pytest.raises(ValueError, match=r"expected \[12, 1\].*received .*Remedy"):
                loss(td)
        else:
            with pytest.raises((ValueError, RuntimeError, IndexError)):
                loss(td)

    def test_weights_of_either_shape(self, name):
        loss, td = make(name)
        td["priority_weight"] = torch.rand(12) + 0.1
        expected, _ = gradients(loss, td)
        td["priority_weight"] = td["priority_weight"].unsqueeze(-1)
        got, _ = gradients(loss, td)
        for key in expected.keys():
            close(got[key], expected[key])

    @pytest.mark.parametrize("reduction", ["none", "sum"])
    def test_reductions(self, name, reduction):
        mean, td = make(name)
        loss, _ = make(name, reduction=reduction)
        torch.manual_seed(1)
        expected = mean(td)
        torch.manual_seed(1)
        got = loss(td)
        for key in [key for key in expected.keys() if key.startswith("loss")]:
            value = got[key].mean() if reduction == "none" else got[key] / 12
            assert got[key].shape == ((12,) if reduction == "none" else ())
            close(value, expected[key])

    def test_half_precision(self, name):
        loss, td = make(name)
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(td.clone())
        expected, _ = make(name)
        exact = expected(td)
        for key in [key for key in exact.keys() if key.startswith("loss")]:
            assert out[key].dtype == torch.float32
            close(out[key], exact[key], rtol=0.1, atol=0.1)


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


class TestValuesAreTorchRLs:
    @pytest.mark.parametrize("shape", [(12,), (3, 4), (1,)])
    @pytest.mark.parametrize("options", [{}, {"num_qvalue_nets": 3, "loss_function": "l2", "alpha_init": 0.2}])
    @pytest.mark.parametrize("more", ["", "weights", "steps"])
    def test_sac(self, shape, options, more):
        ours, td = make("sac", shape, **options)
        theirs = their_sac(ours, **options)
        if more == "weights":
            td["priority_weight"] = torch.rand(shape) + 0.1
        if more == "steps":
            td["steps_to_next_obs"] = torch.randint(1, 4, (*shape, 1))
        mine, other = td.clone(), td.clone()
        got, expected = ours(mine), theirs(other)
        assert set(got.keys()) == set(expected.keys()) == set(ours.out_keys)
        for key in expected.keys():
            close(got[key], expected[key])
        close(mine["td_error"], other["td_error"])
        total(got).backward()
        total(expected).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(mine.grad, other.grad)

    @pytest.mark.parametrize("options", [{"min_alpha": 0.5, "max_alpha": 2.0}, {"fixed_alpha": True}, {"max_alpha": 0.1}])
    def test_bounds_of_the_temperature(self, options):
        ours, td = make("sac", **options, alpha_init=0.3)
        theirs = their_sac(ours, alpha_init=0.3, **options)
        close(ours(td)["alpha"], theirs(td)["alpha"])

    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize("shape", [(12,), (3, 4)])
    def test_td3(self, shape, weights):
        ours, td = make("td3", shape)
        torch.manual_seed(0)
        theirs = TD3Loss(make_policy(), make_critic(), bounds=(-1.0, 1.0), policy_noise=0.0)
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
        ours.make_value_estimator(gamma=GAMMA)
        SoftUpdate(theirs, tau=0.1)
        ours.load_state_dict(theirs.state_dict())
        if weights:
            td["priority_weight"] = torch.rand(shape) + 0.1
        mine, other = td.clone(), td.clone()
        got, expected = ours(mine), theirs(other)
        for key in ("loss_actor", "loss_qvalue"):
            close(got[key], expected[key])
        close(mine["td_error"].square(), other["td_error"])

    def test_td3_noise_is_in_the_unit_of_actions(self):
        torch.manual_seed(0)
        policy = TensorDictModule(nn.Linear(OBS, ACT), ["observation"], ["action"])
        loss = DeviceTD3Loss(policy, make_critic(), action_spec=Bounded(-4, 4, (5, ACT)), policy_noise=0.2)
        td = make_batch(6)
        plain = loss.act(loss.target_actor, td, following=True)
        got = loss.next_action(td, torch.ones(6, ACT))
        close(got, (plain + 0.2).clamp(-4, 4))
        close(loss.next_action(td, torch.full((6, ACT), 9.0)), (plain + 0.5).clamp(-4, 4))

    @pytest.mark.parametrize("one_hot", [False, True])
    @pytest.mark.parametrize("double", [False, True])
    @pytest.mark.parametrize("shape", [(12,), (3, 4)])
    def test_dqn(self, one_hot, double, shape):
        torch.manual_seed(0)
        network = make_values(one_hot)
        td = make_batch(*shape, actions="one-hot" if one_hot else "index")
        options = {"double_dqn": double, "loss_function": "smooth_l1"}
        ours, theirs = DeviceDQNLoss(network, **options), DQNLoss(network, **options)
        for loss in (ours, theirs):
            loss.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
            SoftUpdate(loss, tau=0.5)
            with torch.no_grad():
                for value in loss.target_value_network_params.values(True, True):
                    value.add_(torch.linspace(-0.3, 0.3, value.numel()).view_as(value))
        mine, other = td.clone(), td.clone()
        close(ours(mine)["loss"], theirs(other)["loss"])
        close(mine["td_error"].square(), other["td_error"].squeeze(-1))

    @pytest.mark.parametrize("one_hot", [False, True])
    def test_c51(self, one_hot):
        torch.manual_seed(0)
        network = DistributionalQValueActor(
            MLP(OBS, (5, CHOICES), num_cells=[8]),
            in_keys=["observation"],
            support=torch.linspace(-2, 2, 5),
            spec=(OneHot if one_hot else Categorical)(CHOICES),
        )
        td = make_batch(12, actions="one-hot" if one_hot else "index").to("cpu")
        ours, theirs = DeviceC51Loss(network, gamma=GAMMA), DistributionalDQNLoss(network, gamma=GAMMA)
        SoftUpdate(theirs, tau=0.5)
        if not one_hot:
            td["action"] = td["action"].unsqueeze(-1)
        close(ours(td.clone())["loss"], theirs(td.clone())["loss"])


class TestNetworks:
    @pytest.mark.parametrize("number", ["auto", 2, 5])
    @pytest.mark.parametrize("loop", [False, True])
    def test_one_critic_becomes_twins(self, number, loop):
        torch.manual_seed(0)
        for critic in (make_critic(), EnsembleQ(1, OBS + ACT, hidden_sizes=(8,))):
            loss = DeviceSACLoss(make_actor(), critic, num_qvalue_nets=number, deactivate_vmap=loop)
            count = 2 if number == "auto" else number
            assert loss.num_qvalue_nets == count
            assert {v.shape[0] for v in loss.qvalue_network_params.values(True, True)} == {count}
            td = make_batch(6)
            values = loss.values(loss.critic, td, td["action"])
            assert values.shape == (6, count)
            assert not torch.allclose(values[:, 0], values[:, 1])

    def test_lists_keep_their_values(self):
        torch.manual_seed(0)
        critics, td = [make_critic() for _ in range(3)], make_batch(6)
        loss = DeviceSACLoss(make_actor(), critics)
        expected = torch.cat([critic(td.clone())["state_action_value"] for critic in critics], -1)
        close(loss.values(loss.critic, td, td["action"]), expected)

    @pytest.mark.parametrize(
        ("critic", "options", "message"),
        [
            (lambda: EnsembleQ(3, OBS + ACT), {"num_qvalue_nets": 2}, "num_qvalue_nets: expected 3"),
            (lambda: [make_critic()] * 2, {"num_qvalue_nets": 3}, "num_qvalue_nets: expected 2"),
            (make_critic, {"num_qvalue_nets": 0}, "num_qvalue_nets: expected a positive integer"),
            (make_critic, {"value_network": make_critic()}, "value_network"),
            (make_critic, {"delay_actor": True}, "delay_actor: expected False"),
            (make_critic, {"reduction": "median"}, "reduction: expected"),
            (make_critic, {"use_prioritized_weights": "no"}, "use_prioritized_weights: expected"),
            (make_critic, {"scalar_output_mode": "both"}, "scalar_output_mode: expected"),
            (make_critic, {"min_alpha": 2.0, "max_alpha": 1.0}, "min_alpha"),
        ],
    )
    def test_refused(self, critic, options, message):
        with pytest.raises(ValueError, match=message):
            DeviceSACLoss(make_actor(), critic(), **options)

    def test_unknown_arguments(self):
        with pytest.raises(TypeError, match=r"received \['alfa'\]"):
            DeviceSACLoss(make_actor(), make_critic(), alfa=1.0)
        with pytest.raises(TypeError, match=r"expected \['qvalue_network'\]"):
            DeviceTD3Loss(make_policy())

    def test_other_numbers_of_outputs(self):
        td = make_batch(6, actions="index")
        with pytest.raises(ValueError, match=r"qvalue_network: expected values \[6, 1\]"):
            DeviceSACLoss(make_actor(), make_critic(3))(make_batch(6))
        for loss in (
            DeviceDQNLoss(MLP(OBS, 3, num_cells=[8]), action_space=Categorical(CHOICES)),
            QuantileDQNLoss(QuantileMLP(OBS, 3), action_space=OneHot(CHOICES)),
            DeviceC51Loss(CategoricalMLP(OBS, 3, v_min=-1.0, v_max=1.0), action_space=Categorical(CHOICES)),
        ):
            with pytest.raises(ValueError, match="value_network: expected values"):
                loss(td)

    @pytest.mark.parametrize("space", ["mult_one_hot", "binary", MultiOneHot([2, 2])])
    def test_other_action_spaces(self, space):
        if not isinstance(space, str):
            pytest.importorskip("torchrl")
        with pytest.raises(ValueError, match="action_space: expected"):
            DeviceDQNLoss(MLP(OBS, CHOICES, num_cells=[8]), action_space=space)

    def test_shared_parameters_and_separate_losses(self):
        torch.manual_seed(0)
        shared = nn.Linear(OBS, OBS)
        net = nn.Sequential(shared, MLP(OBS, 2 * ACT, num_cells=[8]), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["loc", "scale"]), ["loc", "scale"], distribution_class=Middle
        )
        critic = TensorDictModule(Shares(shared), ["observation", "action"], ["state_action_value"])
        for separate in (False, True):
            loss = DeviceSACLoss(
                actor, critic, num_qvalue_nets=None, separate_losses=separate, target_entropy=-2.0, loss_function="l2"
            )
            (grad,) = torch.autograd.grad(loss(make_batch(6))["loss_qvalue"], [shared.weight], allow_unused=True)
            assert (grad is None) == separate


class Shares(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.net = shared, nn.Linear(OBS + ACT, 2)

    def forward(self, observation, action):
        return self.net(torch.cat([self.shared(observation), action], -1))


class TestKeys:
    def test_nested_keys(self):
        loss, td = make("sac")
        expected = loss(td.clone())
        moved = td.clone()
        moved["agents", "weight"] = torch.ones(12)
        moved["next", "agents", "reward"] = moved["next"].pop("reward")
        moved["next", "agents", "ended"] = moved["next"].pop("terminated")
        loss.set_keys(
            reward=("agents", "reward"),
            terminated=("agents", "ended"),
            priority=("agents", "error"),
            priority_weight=("agents", "weight"),
        )
        assert ("next", "agents", "reward") in loss.in_keys
        close(loss(moved)["loss_qvalue"], expected["loss_qvalue"])
        assert moved["agents", "error"].shape == (12,)
        loss.set_keys(reward=None)
        assert loss.tensor_keys.reward == loss.default_keys().reward == "reward"
        with pytest.raises(ValueError, match="not an accepted tensordict key"):
            loss.set_keys(nothing="here")

    def test_absent_entries_are_named(self):
        loss, td = make("td3")
        del td["next", "reward"]
        with pytest.raises(KeyError, match="Expected 'reward' in the batch"):
            loss(td)

    def test_by_keywords(self):
        loss, td = make("dqn")
        expected = loss(td.clone())
        got = loss(
            observation=td["observation"],
            action=td["action"],
            next_observation=td["next", "observation"],
            next_reward=td["next", "reward"],
            next_done=td["next", "done"],
            next_terminated=td["next", "terminated"],
        )
        close(got[0], expected["loss"])

    def test_use_of_weights(self):
        loss, td = make("dqn", use_prioritized_weights=True)
        with pytest.raises(KeyError, match="priority_weight"):
            loss(td)
        plain, _ = make("dqn", use_prioritized_weights=False)
        expected = plain(td)["loss"]
        td["priority_weight"] = torch.rand(12)
        close(plain(td)["loss"], expected)
        assert not torch.allclose(loss(td)["loss"], expected)

    def test_torchrls_masks(self):
        loss, td = make("dqn")
        mask = torch.arange(12) % 2 == 0
        expected = loss(td[mask])["loss"]
        td["collector", "mask"] = mask.unsqueeze(-1)
        close(loss(td)["loss"], expected)


class TestValueEstimators:
    @pytest.mark.parametrize("kind", [ValueEstimators.TD1, ValueEstimators.TDLambda])
    def test_returns_in_time(self, kind):
        ours, td = make("sac", (3, 4))
        theirs = their_sac(ours)
        options = {"gamma": GAMMA} | ({"lmbda": 0.7} if kind is ValueEstimators.TDLambda else {})
        td["next", "done"] = td["next", "terminated"] | td["next", "done"]
        for loss in (ours, theirs):
            loss.make_value_estimator(kind, **options)
        td.refine_names(..., "time")
        close(ours(td.clone())["loss_qvalue"], theirs(td.clone())["loss_qvalue"])
        with pytest.raises(ValueError, match="expected steps in time"):
            ours(td.reshape(12))

    def test_the_discount_has_effect(self):
        loss, td = make("quantile")
        td["next", "terminated"].zero_()
        before = loss(td)["loss"]
        assert loss.make_value_estimator(gamma=0.1) is loss
        assert loss.gamma == 0.1 and not torch.allclose(loss(td)["loss"], before)
        assert float(loss.value_estimator.gamma) == pytest.approx(0.1)

    def test_objects(self):
        loss, _ = make("sac")
        loss.make_value_estimator(TDLambdaEstimator(gamma=0.8, lmbda=0.5, value_network=None))
        assert (loss.gamma, loss.lmbda) == (pytest.approx(0.8), pytest.approx(0.5))

    @pytest.mark.parametrize("kind", [ValueEstimators.GAE, ValueEstimators.VTrace, "gae"])
    def test_others_are_refused(self, kind):
        loss, _ = make("sac")
        with pytest.raises(NotImplementedError, match="expected one of"):
            loss.make_value_estimator(kind)
        with pytest.raises(NotImplementedError, match=r"\['TD0'\]"):
            make("c51")[0].make_value_estimator(ValueEstimators.TDLambda)
        with pytest.raises(TypeError, match="average_rewards"):
            loss.make_value_estimator(average_rewards=True)


class TestEpsilonGreedyAsANetwork:
    @pytest.mark.parametrize("one_hot", [False, True])
    @pytest.mark.parametrize("double", [False, True])
    def test_in_either_loss(self, one_hot, double):
        torch.manual_seed(0)
        spec = (OneHot if one_hot else Categorical)(CHOICES)
        policy = EpsilonGreedy(MLP(OBS, CHOICES, num_cells=[8]), spec=spec)
        td = make_batch(12, actions="one-hot" if one_hot else "index")
        ours, theirs = DeviceDQNLoss(policy, double_dqn=double), DQNLoss(policy, double_dqn=double)
        for loss in (ours, theirs):
            SoftUpdate(loss, tau=0.5)
        close(ours(td.clone())["loss"], theirs(td.clone())["loss"])


@pytest.mark.parametrize("members", [1, 3])
def test_ensembles_in_torchrls_loss(members):
    torch.manual_seed(0)
    ensemble, td = EnsembleQ(members, OBS + ACT, hidden_sizes=(8,)), make_batch(12)
    theirs = SACLoss(make_actor(), ensemble.critics(), num_qvalue_nets=members)
    torch.manual_seed(0)
    ours = DeviceSACLoss(make_actor(), ensemble, num_qvalue_nets=members)
    ours.actor.load_state_dict(theirs.actor_network.state_dict())
    SoftUpdate(theirs, tau=0.1)
    close(ours(td.clone())["loss_qvalue"], theirs(td.clone())["loss_qvalue"])
    close(ensemble(td.clone())["state_action_value"], ensemble(td["observation"], td["action"]))
    SACLoss(make_actor(), EnsembleQ(1, OBS + ACT, hidden_sizes=(8,)))


def test_deterministic_actor_bounds_serve_without_a_spec():
    net = nn.Linear(OBS, ACT)
    loss = DeviceTD3Loss(DeterministicActor(net, spec=Bounded(-2, 2, (ACT,))), make_critic())
    assert loss(make_batch(6))["loss_actor"].isfinite()
    with pytest.raises(ValueError, match="bounds, action_spec: expected one of them"):
        DeviceTD3Loss(make_policy(), make_critic(), bounds=(-1.0, 1.0), action_spec=Bounded(-1, 1, (ACT,)))
