"""OptionLoss: by hand, finite differences, masks, clipping, a task that only the semi-Markov discount solves."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import OptionController, OptionSet
from torchrl_perf.objectives import OptionLoss
from torchrl_perf.runtime import no_host_sync

OBS, B = 3, 10


class Table(nn.Module):
    """One row of outputs, whatever the input."""

    def __init__(self, values, dtype=torch.float32):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, x):
        return self.values.expand(*x.shape[:-1], -1)


def network(outputs, dtype=torch.float64):
    return nn.Sequential(nn.Linear(OBS, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


def make_controller(selector, outputs, dtype=torch.float32, **options):
    example = TensorDict({"observation": torch.zeros(2, OBS, dtype=dtype)}, [2])
    names = [f"o{index}" for index in range(outputs)]
    return OptionController(selector, OptionSet(names, initiation=options.pop("initiation", None)), example=example,
                            **options)  # fmt: skip


def make_batch(options=3, dtype=torch.float64, device="cpu"):
    torch.manual_seed(2)
    option = torch.randint(options, (B,))
    available = (torch.rand(B, options) < 0.6) | (torch.arange(options) == option.unsqueeze(-1))
    steps = torch.randint(1, 9, (B, 1))
    td = TensorDict(
        {
            "observation": torch.randn(B, OBS, dtype=dtype),
            "active_option": option,
            "option_log_prob": -torch.rand(B, dtype=dtype),
            "option_available": available,
            "gamma": torch.pow(torch.tensor(0.9, dtype=dtype), steps),
            "steps_to_next_obs": steps,
            "mask": torch.rand(B) < 0.7,
            "next": {
                "observation": torch.randn(B, OBS, dtype=dtype),
                "reward": torch.randn(B, 1, dtype=dtype),
                "terminated": torch.rand(B, 1) < 0.3,
                "option": option,
                "option_age": steps.squeeze(-1),
            },
        },
        [B],
    )
    return td.to(device)


def make_loss(outputs=3, device="cpu", dtype=torch.float64, **options):
    torch.manual_seed(1)
    controller = make_controller(network(3, dtype), 3, dtype, temperature=0.7)
    return OptionLoss(controller, network(outputs, dtype), **options).to(device)


def total(out):
    return sum(value for key, value in out.items() if key.startswith("loss_"))


class TestByHand:
    def losses(self, value, **options):
        """Two transitions: R = 1, n = 2, s' goes on; R = 3, terminal. Two options with p = .8 and .2."""
        controller = make_controller(Table([math.log(4.0), 0.0]), 2)
        loss = OptionLoss(controller, Table(value), normalize_advantage=False, **options)
        td = TensorDict(
            {
                "observation": torch.zeros(2, OBS),
                "active_option": torch.tensor([0, 1]),
                "option_log_prob": torch.tensor([0.8, 0.1]).log(),
                "option_available": torch.ones(2, 2, dtype=torch.bool),
                "gamma": torch.tensor([[0.25], [0.5]]),
                "next": {
                    "observation": torch.tensor([[0.0] * OBS, [torch.nan] * OBS]),
                    "reward": torch.tensor([[1.0], [3.0]]),
                    "terminated": torch.tensor([[False], [True]]),
                },
            },
            [2],
        )
        return loss, loss(td), td

    def test_option_values(self):
        # V(s) = .8 * 10 + .2 * 5 = 9 in both states; targets 1 + .25 * 9 = 3.25 and 3
        _, out, td = self.losses([10.0, 5.0], clip=None)
        advantages = (3.25 - 9, 3 - 9)
        expected = -(math.log(0.8) * advantages[0] + math.log(0.2) * advantages[1]) / 2
        assert out["loss_option_policy"].item() == pytest.approx(expected, rel=1e-5)
        assert out["loss_option_value"].item() == pytest.approx(((10 - 3.25) ** 2 + (5 - 3) ** 2) / 2, rel=1e-5)
        entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
        assert out["loss_option_entropy"].item() == pytest.approx(-0.01 * entropy, rel=1e-5)
        assert td["td_error"].tolist() == pytest.approx([6.75, 2.0])

    def test_state_value_and_clip(self):
        # the ratio of the second is .2 / .1 = 2, clipped only where that gives less
        _, out, _ = self.losses([9.0], clip=0.2)
        assert out["loss_option_policy"].item() == pytest.approx(-(1.0 * -5.75 + 2.0 * -6.0) / 2, rel=1e-5)
        _, out, _ = self.losses([2.0], clip=0.2)
        assert out["loss_option_policy"].item() == pytest.approx(-(1.0 * (1.5 - 2) + 1.2 * (3 - 2)) / 2, rel=1e-5)
        assert out["option_clip_fraction"].item() == 0.5
        assert out["option_kl"].item() == pytest.approx((2 - 1 - math.log(2)) / 2, rel=1e-5)

    def test_a_delayed_copy_gives_the_next_value(self):
        loss, out, _ = self.losses([9.0], delay_value=True)
        with torch.no_grad():
            loss.value.values.zero_()
        td = self.losses([9.0])[2]
        assert loss.target(td).tolist() == pytest.approx([1 + 0.25 * 9, 3.0])
        loss.update_targets_(0.5)
        assert loss.target(td).tolist() == pytest.approx([1 + 0.25 * 4.5, 3.0])
        assert not any(param.requires_grad for param in loss.target_value.parameters())
        assert out["option_value"].item() == 9.0


class TestGradients:
    @pytest.mark.parametrize("clip", [None, 0.2])
    @pytest.mark.parametrize("outputs", [1, 3])
    def test_finite_differences(self, clip, outputs):
        """All parameters, with everything held that a gradient is not to flow through."""
        loss = make_loss(outputs, clip=clip, delay_value=True, normalize_advantage=outputs == 1)
        td = make_batch()
        names = ["loss_option_value", *(["loss_option_policy", "loss_option_entropy"] if outputs == 1 else [])]
        if outputs == 3:  # the baseline depends on the selector, and the target on it: the value's loss alone is plain
            td["next", "terminated"].fill_(True)

        def value():
            out = loss(td)
            return sum(out[name] for name in names)

        params = [param for param in loss.parameters() if param.requires_grad]
        grads = torch.autograd.grad(value(), params, allow_unused=True)
        held = [param.detach().clone() for param in params]
        if outputs == 1:  # the advantage has no gradient, so that the value's parameters get none from the policy
            grads, held, params = [entry[: len(entry) // 2] for entry in (grads, held, params)]
        grads = [torch.zeros_like(param) if grad is None else grad for param, grad in zip(params, grads, strict=True)]
        for param, grad, start in zip(params, grads, held, strict=True):
            for index in range(min(param.numel(), 6)):
                sides = []
                for step in (1e-6, -1e-6):
                    with torch.no_grad():
                        param.view(-1)[index] = start.view(-1)[index] + step
                        sides.append(float(value()))
                        param.copy_(start)
                assert float(grad.view(-1)[index]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)

    def test_no_gradient_where_only_one_option_was_available(self):
        loss, td = make_loss(entropy_coeff=1.0), make_batch()
        td["option_available"] = td["active_option"].unsqueeze(-1) == torch.arange(3)
        total(loss(td)).backward()
        assert all(float(param.grad.abs().max()) < 1e-12 for param in loss.controller.parameters())


class TestMask:
    def test_rows_outside_count_for_nothing_and_may_be_anything(self, device):
        loss, td = make_loss(device=device), make_batch(device=device)
        mask = td["mask"]
        kept = loss(td[mask])
        for key in ("option_log_prob", "gamma", ("next", "observation"), ("next", "reward")):
            td[key][~mask] = torch.nan
        td["active_option"][~mask] = 2
        td["option_available"][~mask] = torch.tensor([True, True, False], device=device)
        out = loss(td)
        for key, value in kept.items():
            torch.testing.assert_close(out[key], value)
        grads = []
        for batch in (td, td[mask]):
            loss.zero_grad()
            total(loss(batch)).backward()
            grads.append([param.grad.clone() for param in loss.parameters()])
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)
        assert (td["td_error"][~mask] == 0).all()

    def test_no_row_at_all(self):
        loss, td = make_loss(), make_batch()
        td["mask"].fill_(False)
        td["option_available"].fill_(False)
        out = loss(td)
        assert all(value.item() == 0 for value in out.values())
        total(out).backward()
        assert all(param.grad.isfinite().all() for param in loss.parameters())

    def test_without_a_mask_all_count(self):
        td = make_batch()
        everything = td.clone()
        everything["mask"].fill_(True)
        assert (make_loss()(td.exclude("mask")) == make_loss()(everything)).all()

    def test_importance_weights(self):
        loss, td = make_loss(normalize_advantage=False), make_batch()
        twice = torch.cat([td, td[:4]])
        td["priority_weight"] = torch.tensor([2.0] * 4 + [1.0] * 6, dtype=torch.float64)
        for key, value in loss(twice).items():
            torch.testing.assert_close(loss(td)[key], value)

    def test_any_batch_shape(self):
        flat = make_batch()
        nested = flat.reshape(2, 5)
        out = make_loss()(nested)
        assert nested["td_error"].shape == (2, 5)
        for key, value in make_loss()(flat).items():
            torch.testing.assert_close(out[key], value)


class TestTask:
    def learn(self, reward, gamma=0.9, steps=400):
        """Two options in one state, for ever: 1 in one step, or a reward at the last of five. Shares at the end."""
        torch.manual_seed(0)
        controller = make_controller(Table([0.0, 0.0]), 2)
        loss = OptionLoss(controller, Table([0.0, 0.0]), entropy_coeff=0.001)
        optimizer = torch.optim.Adam(loss.parameters(), 0.05)
        for _ in range(steps):
            td = TensorDict({"observation": torch.zeros(64, OBS)}, [64])
            td["option"] = td["option_age"] = torch.zeros(64, dtype=torch.int64)
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                controller(td)
            longer = td["active_option"] == 1
            duration = torch.where(longer, 5, 1)
            returns = torch.where(longer, reward * gamma**4, 1.0)
            td["gamma"] = torch.pow(gamma, duration.float()).unsqueeze(-1)
            td["next"] = TensorDict({"observation": torch.zeros(64, OBS)}, [64])
            td["next", "reward"] = returns.unsqueeze(-1)
            td["next", "terminated"] = torch.zeros(64, 1, dtype=torch.bool)
            optimizer.zero_grad()
            total(loss(td)).backward()
            optimizer.step()
        return torch.softmax(controller.selector.values.detach(), -1)

    @pytest.mark.parametrize(("reward", "best"), [(3.6, 0), (7.0, 1)])
    def test_the_better_option_is_found_though_the_longer_one_always_returns_more(self, reward, best):
        # the first for ever is worth 1 / (1 - .9) = 10, the second reward * .9^4 / (1 - .9^5): 5.77 and 11.2
        values = (1 / (1 - 0.9), reward * 0.9**4 / (1 - 0.9**5))
        assert reward * 0.9**4 > 1
        assert values.index(max(values)) == best
        assert self.learn(reward)[best] > 0.95


class TestHostAndVariants:
    def test_no_host_read(self, device):
        loss, td = make_loss(device=device), make_batch(device=device)
        with no_host_sync(device):
            total(loss(td)).backward()
            loss.update_targets_(0.1)

    @pytest.mark.slow_compiled
    def test_variants_agree(self, variant):
        loss = make_loss(device=variant.device, dtype=torch.float32)
        td = make_batch(dtype=torch.float32, device=variant.device)
        parameters = list(loss.parameters())
        # the compiler sees the loss alone, a graph holds its gradients, too
        losses = variant(lambda td: dict(loss(td.copy()).items())) if variant.name == "compiled" else loss

        def step(losses):
            out = losses(td.copy())
            grads = torch.autograd.grad(total(out), parameters)
            # an output that holds its graph keeps the parameters' nodes, which belong to the stream they were made on
            return {key: value.detach() for key, value in out.items()}, grads

        expected, grads = step(loss)
        run = variant(lambda: step(loss)) if variant.name == "graph" else lambda: step(losses)
        for _ in range(4):  # the last one is a replay
            out, found = run()
        for key, value in expected.items():
            torch.testing.assert_close(out[key], value, rtol=1e-4, atol=1e-6)
        for one, other in zip(grads, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


class TestBadInput:
    @pytest.mark.parametrize("clip", [0.0, 1.0, -0.1])
    def test_clip(self, clip):
        with pytest.raises(ValueError, match="clip: expected epsilon"):
            make_loss(clip=clip)

    def test_coefficients(self):
        with pytest.raises(ValueError, match="coefficients: expected none below 0"):
            make_loss(entropy_coeff=-1.0)


def test_a_row_counts_where_mask_and_validity_agree():
    td = make_batch()
    td["valid"], td["mask"] = torch.arange(B) % 3 != 0, torch.arange(B) % 2 != 0
    both = td["mask"] & td["valid"]
    out, expected = make_loss(valid_key="valid")(td), make_loss(valid_key="valid")(td[both])
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value)
