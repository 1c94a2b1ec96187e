"""The sequential autoencoder: encoders, decoders, dynamics, the filter beside an env, what inputs are planned for."""

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Normal, Poisson
from torchrl.envs import TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import LatentField
from torchrl_perf.modules import ICEMPlanner, ICEMSettings
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.active_dynamics import (
    BeliefFilter,
    FilteredPolicy,
    InformationReward,
    LatentDecoder,
    LatentDynamics,
    ObservationEncoder,
    SeqVAE,
    UniformInputs,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["mlp", "linear", "rbf", "ensemble", "rbf_ensemble"]
TINY = ICEMSettings(horizon=3, candidates=6, iterations=2, elites=3)


def make(encoder="gru", dynamics="rbf", device="cpu", channels=20):
    torch.manual_seed(0)
    return SeqVAE(
        ObservationEncoder(channels, kind=encoder, hidden_size=8, counts=True, device=device),
        LatentDynamics(kind=dynamics, hidden_size=32, num_members=3, device=device),
        LatentDecoder(channels, device=device),
    )


def make_policy(model, env, inputs="random"):
    if inputs == "random":
        return FilteredPolicy(BeliefFilter(model.encoder), UniformInputs(env.action_spec))
    reward = InformationReward(model.dynamics, inputs)
    planner = ICEMPlanner(model.dynamics, reward, spec=env.action_spec, settings=TINY, state_key="belief")
    return FilteredPolicy(BeliefFilter(model.encoder), planner)


def collect(model, *, envs=3, steps=25, inputs="random", device="cpu", limit=9):
    env = LatentField(envs, max_episode_steps=limit, seed=0, device=device)
    policy = make_policy(model, env, inputs)
    state = policy.make_state()
    env = TransformedEnv(env, state) if state.shapes else env
    return DeviceCollector(env, policy, frames_per_batch=envs * steps, mode="eager")


class TestFilter:
    @pytest.mark.parametrize("kind", ["mlp", "gru"])
    @pytest.mark.parametrize("device", DEVICES)
    def test_step_by_step_is_encoding_again(self, kind, device):
        model = make(kind, device=device)
        batch = collect(model, device=device).collect()
        assert batch["next", "done"].sum() >= 6  # episodes end within it
        with torch.no_grad():
            again = model.encode(batch["observation"], batch["action"], batch["is_init"].squeeze(-1))
        assert (again.loc - batch["belief"]).abs().max() < 1e-5

    def test_a_window_goes_on_from_the_state_before_it(self):
        model = make()
        batch = collect(model, limit=None).collect()
        part = batch[:, 10:]
        with torch.no_grad():
            carried = model.encode(
                *(part["observation"], part["action"], part["is_init"].squeeze(-1)),
                *(part["hidden"][:, 0], part["previous_action"][:, 0]),
            )
            fresh = model.encode(part["observation"], part["action"], part["is_init"].squeeze(-1))
        assert (carried.loc - part["belief"]).abs().max() < 1e-5
        assert (fresh.loc - part["belief"]).abs().max() > 1e-3

    def test_it_is_the_cell_of_torch(self):
        model = make()
        y, a = torch.rand(2, 5, 20), torch.randn(2, 5, 2)
        found = model.encode(y, a, torch.zeros(2, 5, dtype=torch.bool))
        gru = torch.nn.GRU(22, 8, batch_first=True)
        gru.load_state_dict({f"{name}_l0": value for name, value in model.encoder.cell.state_dict().items()})
        before = torch.cat((torch.zeros(2, 1, 2), a[:, :-1]), 1)
        code, last = gru(torch.cat((y.log1p(), before), -1))
        torch.testing.assert_close(found.loc, model.encoder.loc(code))
        torch.testing.assert_close(found.hidden, last[0])
        assert found.var.median().item() == pytest.approx(0.049, abs=0.02)  # softplus(-3)

    def test_what_is_not_finite_ends_with_its_episode(self):
        model = make()
        y, a = torch.rand(1, 6, 20), torch.randn(1, 6, 2)
        y[0, 1] = torch.nan
        is_init = torch.tensor([[True, False, False, True, False, False]])
        loc = model.encode(y, a, is_init).loc
        assert loc[0, 1:3].isnan().all() and loc[0, 3:].isfinite().all()

    def test_without_its_state_it_says_so(self):
        model = make()
        with pytest.raises(KeyError, match=r"TransformedEnv\(env, filter.make_state\(\)\)"):
            BeliefFilter(model.encoder)(TensorDict({"observation": torch.zeros(2, 20)}, [2]))
        with pytest.raises(ValueError, match="zeros at the first step"):
            model.encoder(torch.zeros(2, 20))


class TestPolicy:
    @pytest.mark.parametrize("inputs", ["random", "fisher_d"])
    def test_state_begins_anew_and_nothing_waits(self, inputs):
        collector = collect(make(), inputs=inputs, steps=12, limit=5)
        collector.collect()
        with no_host_sync():
            batch = collector.collect()
        assert batch["action"].abs().max() <= 0.1 + 1e-6
        first = batch["is_init"].squeeze(-1)
        assert first.sum() >= 6
        assert (batch["hidden"][first] == 0).all() and (batch["previous_action"][first] == 0).all()
        going_on = ~first[:, 1:]
        assert torch.equal(batch["previous_action"][:, 1:][going_on], batch["action"][:, :-1][going_on])

    def test_random_inputs_fill_their_range(self):
        env = LatentField(4_000, action_max=0.5)
        action = UniformInputs(env.action_spec)(TensorDict({}, [4_000]))["action"]
        assert action.shape == (4_000, 2) and action.abs().max() <= 0.5
        assert action.mean().abs() < 0.02 and action.square().mean().item() == pytest.approx(1 / 12, abs=0.004)


class TestDynamics:
    @pytest.mark.parametrize("kind", KINDS)
    def test_shapes_and_members(self, kind):
        model = make(dynamics=kind).dynamics
        z, a = torch.randn(4, 6, 2), torch.randn(4, 6, 2)
        following = model(z, a)
        members = model.predict_members(z, a, per_member=False)
        assert following.shape == (4, 6, 2) and members.shape == (model.num_members, 4, 6, 2)
        torch.testing.assert_close(members.mean(0), following)
        each = model.predict_members(z.expand(model.num_members, 4, 6, 2), a)
        torch.testing.assert_close(each, members)
        assert model.variance.tolist() == pytest.approx([0.1 * 0.1] * 2, rel=1e-3)  # q dt

    @pytest.mark.parametrize("dynamics", ["ensemble", "rbf_ensemble"])
    def test_an_ensemble_of_separate_states(self, dynamics):
        model = make(dynamics=dynamics).dynamics
        z, a = torch.randn(3, 5, 2), torch.randn(5, 2)
        together = model.predict_members(z, a)
        for member in range(3):
            alone = model.predict_members(z[member], a, per_member=False)[member]
            torch.testing.assert_close(together[member], alone)
        shared = model.predict_members(z, a, per_member=False).mean(0)
        torch.testing.assert_close(shared, model(z, a))

    @pytest.mark.parametrize("kind", ["mlp", "linear", "rbf"])
    def test_the_field_is_linear_in_its_features(self, kind):
        model = make(dynamics=kind).dynamics
        z = torch.randn(7, 2)
        weight = {
            "rbf": lambda: model.weight,
            "linear": lambda: torch.cat((model.net.weight.T, model.net.bias.unsqueeze(0))),
            "mlp": lambda: torch.cat((model.net[4].weight.T, model.net[4].bias.unsqueeze(0))),
        }[kind]()
        assert model.features(z).shape == (7, model.num_features)
        torch.testing.assert_close(model.features(z) @ weight, model.field(z))

    def test_radial_basis_by_hand(self):
        model = make(dynamics="rbf").dynamics
        assert model.centres.shape == (25, 2) and model.centres.abs().max() == 2
        features = model.features(torch.tensor([1.0, 0.0]))
        assert features.max() == 1  # on a centre
        origin = (model.centres == 0).all(-1)
        assert features[origin].item() == pytest.approx(torch.tensor(-1.0).exp().item())

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_radial_functions_of_any_grid(self, size):
        model = LatentDynamics(size, 2, kind="rbf", centres=4, rbf_range=1.2)
        z = torch.randn(6, size)
        distance = (z.unsqueeze(1) - model.centres).square().sum(-1)
        expected = torch.exp(-distance / 0.8**2)  # centres are .8 apart
        torch.testing.assert_close(model.features(z), expected)

    def test_the_input_is_added_for_the_time_of_a_step(self):
        model = make(dynamics="linear").dynamics
        z, a = torch.randn(3, 2), torch.randn(3, 2)
        torch.testing.assert_close(model(z, a) - model(z, 0 * a), 0.1 * a)

    def test_several_steps(self):
        model = make()
        z, a = torch.randn(3, 2), torch.randn(3, 4, 2)
        found = model.predict(z, a)
        for k in range(4):
            z = model.dynamics(z, a[:, k])
            assert torch.equal(found[:, k], z)

    def test_refusals(self):
        with pytest.raises(ValueError, match="'cubic'"):
            LatentDynamics(kind="cubic")
        with pytest.raises(ValueError, match="positive dt"):
            LatentDynamics(dt=0.0)
        with pytest.raises(ValueError, match="centres"):
            LatentDynamics(6, 6, kind="rbf")
        with pytest.raises(ValueError, match="from 2 centres"):
            LatentDynamics(kind="rbf", centres=1)
        with pytest.raises(ValueError, match="disagreement"):
            LatentDynamics(kind="ensemble").features(torch.zeros(1, 2))


class TestDecoder:
    @pytest.mark.parametrize("kind", ["log_linear", "mlp"])
    def test_counts(self, kind):
        decoder = LatentDecoder(5, kind=kind, likelihood="poisson")
        z, y = torch.randn(7, 2), torch.randint(0, 4, (7, 5)).float()
        torch.testing.assert_close(decoder.log_likelihood(y, z), Poisson(decoder(z)).log_prob(y).sum(-1))

    @pytest.mark.parametrize("kind", ["linear", "log_linear", "mlp"])
    def test_normal_channels(self, kind):
        decoder = LatentDecoder(5, kind=kind, likelihood="gaussian")
        z, y = torch.randn(3, 7, 2), torch.randn(7, 5)
        expected = Normal(decoder(z), (decoder.log_var / 2).exp()).log_prob(y).sum(-1)
        torch.testing.assert_close(decoder.log_likelihood(y, z), expected)
        assert (decoder(z) > 0).all() or kind != "log_linear"

    def test_refusals(self):
        with pytest.raises(ValueError, match="log_linear"):
            LatentDecoder(5, kind="linear", likelihood="poisson")
        with pytest.raises(ValueError, match="'cubic'"):
            LatentDecoder(5, kind="cubic")
        with pytest.raises(ValueError, match="'lstm'"):
            ObservationEncoder(5, kind="lstm")


class TestReward:
    def plans(self):
        torch.manual_seed(1)
        return torch.randn(2, 5, 4, 2), torch.randn(2, 5, 3, 2)

    @pytest.mark.parametrize(
        ("kind", "dynamics", "shape"),
        [
            ("fisher_a", "rbf", (2, 5)),
            ("fisher_d", "mlp", (2, 5)),
            ("embedding", "linear", (2, 5)),
            ("disagreement", "ensemble", (2, 5, 3)),
            ("rnd", "rbf", (2, 5, 3)),
        ],
    )
    def test_shapes_and_waits(self, kind, dynamics, shape):
        reward = InformationReward(make(dynamics=dynamics).dynamics, kind)
        states, actions = self.plans()
        with no_host_sync():
            reward.observe(states)
            found = reward(states, actions)
        assert found.shape == shape and found.isfinite().all()

    def test_optimality_by_hand(self):
        model = make(dynamics="linear").dynamics
        states, actions = self.plans()
        found = {
            kind: InformationReward(model, kind, discount=0.5)(states, actions)
            for kind in ("fisher_a", "fisher_d", "embedding")
        }
        for b, p in ((0, 0), (1, 3)):
            matrix = torch.zeros(3, 3)
            for t in range(3):
                row = 0.1 * torch.cat((states[b, p, t], torch.ones(1)))
                matrix += 0.5**t * torch.outer(row, row) / model.variance.mean()
            info = matrix.diagonal()
            assert found["fisher_a"][b, p].item() == pytest.approx(-(1 / (1 + info)).sum().item(), rel=1e-4)
            assert found["fisher_d"][b, p].item() == pytest.approx((1 + info).log().sum().item(), rel=1e-4)
            gain = torch.logdet(torch.eye(3) + matrix).item()
            assert found["embedding"][b, p].item() == pytest.approx(gain, rel=1e-4)

    @pytest.mark.parametrize("kind", ["fisher_d", "embedding"])
    def test_what_is_known_says_less(self, kind):
        reward = InformationReward(make().dynamics, kind)
        states, actions = self.plans()
        before = reward(states, actions)
        reward.observe(torch.full((400, 2), 1.0))
        near = torch.full_like(states, 1.0)
        assert (reward(states, actions) < before).all()
        assert (reward(near, actions) < 0.1 * reward(-near, actions)).all()

    def test_information_of_two_batches(self):
        reward = InformationReward(make().dynamics, "fisher_d", memory=0.5)
        z = torch.randn(6, 2)
        reward.observe(z)
        once = reward.information.clone()
        torch.testing.assert_close(once, (0.1 * reward.dynamics.features(z)).square().sum(0) / 0.01, rtol=1e-3, atol=0)
        reward.observe(z.view(2, 3, 2))
        torch.testing.assert_close(reward.information, 1.5 * once)
        reward.observe(torch.full((1, 2), torch.nan))
        assert reward.information.isfinite().all()

    def test_refusals(self):
        model = make().dynamics
        with pytest.raises(ValueError, match="'kl'"):
            InformationReward(model, "kl")
        with pytest.raises(ValueError, match="positive prior"):
            InformationReward(model, prior=0.0)
        with pytest.raises(ValueError, match="ensemble"):
            InformationReward(model, "disagreement")
        with pytest.raises(ValueError, match="ensemble"):
            InformationReward(make(dynamics="ensemble").dynamics, "fisher_a")
