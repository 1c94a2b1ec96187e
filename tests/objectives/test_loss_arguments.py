"""Off-policy losses called as those of TorchRL: values, networks, keys, value estimators, what is refused."""

import pytest
import torch
from loss_parts import (
    ACT,
    CHOICES,
    GAMMA,
    OBS,
    Middle,
    close,
    make,
    make_actor,
    make_batch,
    make_critic,
    make_policy,
    make_values,
    their_sac,
    total,
)
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, MultiOneHot, OneHot
from torchrl.modules import MLP, DistributionalQValueActor, ProbabilisticActor
from torchrl.objectives import (
    DistributionalDQNLoss,
    DQNLoss,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    ValueEstimators,
)
from torchrl.objectives.value import TDLambdaEstimator

from torchrl_perf.modules import (
    CategoricalMLP,
    DeterministicActor,
    EnsembleQ,
    EpsilonGreedy,
    QuantileMLP,
)
from torchrl_perf.objectives import (
    DeviceC51Loss,
    DeviceDQNLoss,
    DeviceSACLoss,
    DeviceTD3Loss,
    QuantileDQNLoss,
)


class TestValuesAreTorchRLs:
    @pytest.mark.parametrize(
        ("shape", "more", "options"),
        [
            ((12,), "", {}),
            ((3, 4), "weights", {}),
            ((1,), "steps", {}),
            ((12,), "steps", {"num_qvalue_nets": 3, "loss_function": "l2", "alpha_init": 0.2}),
            ((3, 4), "", {"num_qvalue_nets": 1, "deactivate_vmap": True}),
        ],
    )
    def test_sac(self, shape, more, options):
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

    @pytest.mark.parametrize(
        "options", [{"min_alpha": 0.5, "max_alpha": 2.0}, {"fixed_alpha": True}, {"max_alpha": 0.1}]
    )
    def test_bounds_of_the_temperature(self, options):
        ours, td = make("sac", **options, alpha_init=0.3)
        theirs = their_sac(ours, alpha_init=0.3, **options)
        close(ours(td)["alpha"], theirs(td)["alpha"])

    @pytest.mark.parametrize(("shape", "weights"), [((12,), False), ((3, 4), True)])
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

    @pytest.mark.parametrize(
        ("one_hot", "double", "shape"), [(False, False, (12,)), (False, True, (3, 4)), (True, True, (12,))]
    )
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
