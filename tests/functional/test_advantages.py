"""GAE, TD(lambda) and V-trace: hand-computed values, float64 loops, TorchRL's functions, every layout and edge."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.objectives.value import functional as reference

from torchrl_perf import kernels
from torchrl_perf.functional import (
    atoms,
    generalized_advantage_estimate,
    implicit,
    td_lambda_targets,
    vtrace_advantage_estimate,
)

NAN = float("nan")


def column(values, device="cpu", dtype=torch.float32):
    """``[1, T, 1]`` from a list; bool for a list of bools."""
    dtype = torch.bool if isinstance(values[0], bool) else dtype
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1)


def gae_oracle(gamma, lmbda, value, next_value, reward, done, terminated):
    """Serial float64 loop over ``[N, T, ...]``."""
    value, next_value, reward = value.double(), next_value.double(), reward.double()
    advantage, carry = torch.empty_like(value), torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        bootstrap = torch.where(terminated[:, t], 0.0, next_value[:, t])
        delta = reward[:, t] + gamma * bootstrap - value[:, t]
        carry = torch.where(done[:, t], delta, delta + gamma * lmbda * carry)
        advantage[:, t] = carry
    return advantage, advantage + value


def signals(n, t, *, done_rate=0.1, dtype=torch.float32, device="cpu", features=(1,)):
    shape = (n, t, *features)
    value, next_value, reward = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    done = torch.rand(shape, device=device) < done_rate
    terminated = done & (torch.rand(shape, device=device) < 0.5)
    return value, next_value, reward, done, terminated


def time_major(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


class TestHandComputed:
    REWARD, VALUE, NEXT_VALUE = [1.0, 2.0, 3.0, 4.0], [0.5, 1.0, 1.5, 2.0], [1.0, 7.0, 2.0, 3.0]
    END, NO_END = [False, True, False, False], [False, False, False, False]

    def estimate(self, device, terminated, lmbda=0.8, done=END):
        args = (self.VALUE, self.NEXT_VALUE, self.REWARD, done)
        args = [column(x, device) for x in args]
        advantage, target = generalized_advantage_estimate(0.9, lmbda, *args, terminated)
        torch.testing.assert_close(target, advantage + args[0])
        return advantage.flatten().cpu()

    def test_constant_rewards(self, device):
        """``A_t = sum_k (gamma lambda)^k``, of 5 steps with gamma .99 and lambda .95."""
        zeros, ones, never = (column([value] * 5, device) for value in (0.0, 1.0, False))
        advantage, _ = generalized_advantage_estimate(0.99, 0.95, zeros, zeros, ones, never)
        assert advantage.flatten().tolist() == pytest.approx([4.43936, 3.65695, 2.82504, 1.9405, 1.0], abs=1e-5)

    def test_truncation_bootstraps(self, device):
        expected = torch.tensor([6.656, 7.3, 6.684, 4.7])
        torch.testing.assert_close(self.estimate(device, column(self.NO_END, device)), expected)

    def test_termination_does_not(self, device):
        expected = torch.tensor([2.12, 1.0, 6.684, 4.7])
        torch.testing.assert_close(self.estimate(device, column(self.END, device)), expected)
        torch.testing.assert_close(self.estimate(device, None), expected)

    def test_degenerate_lambda(self, device):
        expected = torch.tensor([1.4, 7.3, 3.3, 4.7])
        for lmbda in (0.0, 1e-8, torch.tensor(0.0, device=device), torch.tensor(1e-8, device=device)):
            estimate = self.estimate(device, column(self.NO_END, device), lmbda)
            torch.testing.assert_close(estimate, expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("n", [1, 3, 600])
    def test_long_and_undiscounted_is_exact(self, n, dtype, device):
        zero = torch.zeros(n, 4096, 1, dtype=dtype, device=device)
        never = torch.zeros_like(zero, dtype=torch.bool)
        advantage, target = generalized_advantage_estimate(1.0, 1.0, zero, zero, zero + 1, never, never)
        assert advantage.dtype == target.dtype == torch.float32
        assert torch.equal(advantage.cpu(), torch.arange(4096.0, 0.0, -1.0).view(1, -1, 1).expand(n, -1, 1))

    def test_a_bad_reward_stays_in_its_episode(self, device):
        zero, end = column([0.0] * 4, device), column(self.END, device)
        reward = column([1.0, 1.0, NAN, 1.0], device)
        advantage, _ = generalized_advantage_estimate(0.9, 0.9, zero, zero, reward, end, torch.zeros_like(end))
        torch.testing.assert_close(advantage.flatten().cpu(), torch.tensor([1.81, 1.0, NAN, 1.0]), equal_nan=True)

    @pytest.mark.parametrize("bad", [NAN, float("inf")])
    def test_a_terminated_steps_next_value_reaches_nothing(self, bad, device):
        zero, end = column([0.0] * 3, device), column([False, True, False], device)
        next_value = column([0.0, bad, 0.0], device)
        advantage, target = generalized_advantage_estimate(0.9, 0.9, zero, next_value, zero + 1, end, end)
        torch.testing.assert_close(advantage.flatten().cpu(), torch.tensor([1.81, 1.0, 1.0]))
        torch.testing.assert_close(target.flatten().cpu(), torch.tensor([1.81, 1.0, 1.0]))


class TestAgainstLoops:
    SHAPES = ((1, 1), (1, 37), (5, 1), (3, 4), (17, 130), (2, 1100), (2100, 6), (300, 33))

    @pytest.mark.parametrize("layout", [torch.Tensor.contiguous, time_major])
    @pytest.mark.parametrize(("n", "t"), SHAPES)
    def test_gae_equals_loop_and_torchrl(self, n, t, layout, device):
        tensors = [layout(x) for x in signals(n, t, device=device)]
        expected = gae_oracle(0.99, 0.95, *tensors)
        ours = generalized_advantage_estimate(0.99, 0.95, *tensors)
        theirs = reference.generalized_advantage_estimate(0.99, 0.95, *tensors)
        for result, want, theirs_result in zip(ours, expected, theirs, strict=True):
            torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(result, theirs_result, rtol=1e-4, atol=1e-4)
            assert n == 1 or t == 1 or result.stride()[:2] == tensors[2].stride()[:2]

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    def test_no_end_and_only_ends(self, rate, device):
        tensors = signals(4, 50, done_rate=rate, device=device)
        for ours, want in zip(
            generalized_advantage_estimate(0.9, 0.8, *tensors), gae_oracle(0.9, 0.8, *tensors), strict=True
        ):
            torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)

    def test_numbers_may_be_tensors(self, device):
        tensors = signals(6, 40, device=device, dtype=torch.float64)
        expected = generalized_advantage_estimate(0.99, 0.95, *tensors)
        scalar = [torch.tensor(x, dtype=torch.float64, device=device) for x in (0.99, 0.95)]
        spread = [x.expand(6, 40, 1) for x in scalar]
        for gamma, lmbda in (scalar, spread, (0.99, scalar[1]), (scalar[0].view(1, 1), 0.95)):
            ours = generalized_advantage_estimate(gamma, lmbda, *tensors)
            torch.testing.assert_close(ours, expected)

    def test_discount_of_each_step(self, device):
        tensors = signals(6, 40, device=device)
        gamma = torch.rand(6, 40, 1, device=device)
        ours = generalized_advantage_estimate(gamma, 0.95, *tensors)
        theirs = reference.generalized_advantage_estimate(gamma, 0.95, *tensors)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_float64_stays_float64(self):
        tensors = signals(3, 60, dtype=torch.float64)
        expected = gae_oracle(0.99, 0.95, *tensors)
        ours = generalized_advantage_estimate(0.99, 0.95, *tensors)
        assert ours[0].dtype == torch.float64
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(
        n=st.integers(1, 5), t=st.integers(1, 40), gamma=st.floats(0, 1), lmbda=st.floats(0, 1), rate=st.floats(0, 1),
        seed=st.integers(0, 99),
    )  # fmt: skip
    def test_property_equals_loop(self, n, t, gamma, lmbda, rate, seed):
        torch.manual_seed(seed)
        tensors = signals(n, t, done_rate=rate, dtype=torch.float64)
        ours, expected = generalized_advantage_estimate(gamma, lmbda, *tensors), gae_oracle(gamma, lmbda, *tensors)
        torch.testing.assert_close(ours, expected)

    @settings(max_examples=15, deadline=None)
    @given(
        t=st.integers(2, 30), bad=st.sampled_from([NAN, float("inf")]), where=st.floats(0, 0.9), seed=st.integers(0, 9)
    )  # fmt: skip
    def test_property_a_bad_reward_reaches_its_episode_only(self, t, bad, where, seed):
        torch.manual_seed(seed)
        value, next_value, reward, done, terminated = signals(1, t, done_rate=0.3)
        clean, _ = generalized_advantage_estimate(0.9, 0.9, value, next_value, reward, done, terminated)
        index = int(where * t)
        reward[0, index] = bad
        advantage, _ = generalized_advantage_estimate(0.9, 0.9, value, next_value, reward, done, terminated)
        ends_before = [i for i in range(index) if done[0, i, 0]]
        start = ends_before[-1] + 1 if ends_before else 0
        assert not advantage[0, start : index + 1].isfinite().any()
        assert torch.equal(advantage[0, :start], clean[0, :start])
        assert torch.equal(advantage[0, index + 1 :], clean[0, index + 1 :])


class TestLayouts:
    @pytest.mark.parametrize("time_dim", [0, 1, 2, -1, -2, -3])
    def test_time_is_any_dimension(self, time_dim, device):
        tensors = signals(3, 5, features=(4,), device=device)
        moved = [x.transpose(1, time_dim) for x in tensors]
        ours = generalized_advantage_estimate(0.9, 0.8, *moved, time_dim=time_dim)
        for result, want in zip(ours, gae_oracle(0.9, 0.8, *tensors), strict=True):
            torch.testing.assert_close(result.transpose(1, time_dim).double(), want, rtol=1e-5, atol=1e-5)

    def test_a_single_trajectory_without_features(self, device):
        tensors = [x[0, :, 0] for x in signals(1, 9, device=device)]
        ours, _ = generalized_advantage_estimate(0.9, 0.8, *tensors, time_dim=-1)
        want, _ = gae_oracle(0.9, 0.8, *[x.view(1, 9, 1) for x in tensors])
        torch.testing.assert_close(ours.double(), want.view(9), rtol=1e-5, atol=1e-5)

    def test_agents_share_flags_and_reward(self, device):
        value, next_value, reward, done, terminated = signals(3, 7, features=(4, 1), device=device)
        team = [x[:, :, 0] for x in (reward, done, terminated)]
        spread = [x.unsqueeze(2).expand(3, 7, 4, 1) for x in team]
        want, _ = gae_oracle(0.9, 0.8, value, next_value, *spread)
        ours, _ = generalized_advantage_estimate(0.9, 0.8, value, next_value, *team, time_dim=-3)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)
        ours, _ = generalized_advantage_estimate(0.9, 0.8, value, next_value, spread[0], *team[1:], time_dim=1)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("n", [4, 300])
    def test_inputs_are_left_alone(self, n, device):
        tensors = signals(n, 40, device=device)
        before = [x.clone() for x in tensors]
        generalized_advantage_estimate(0.9, 0.8, *tensors)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))

    def test_columns_of_packed_rows(self, device):
        packed = torch.randn(20, 6, 8, device=device).transpose(0, 1)  # [N, T, fields] in time-major memory
        value, next_value, reward = (packed[..., i : i + 1] for i in (1, 3, 6))
        done = packed[..., 7:] > 1
        ours, _ = generalized_advantage_estimate(0.9, 0.8, value, next_value, reward, done, done)
        want, _ = gae_oracle(0.9, 0.8, value, next_value, reward, done, done)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


class TestGradientsAndCompile:
    def test_gradients(self):
        value, next_value, reward, done, terminated = signals(2, 7, dtype=torch.float64)
        floats = [x.requires_grad_() for x in (value, next_value, reward)]
        gamma, lmbda = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.9, 0.8))

        def estimate(*args):
            return generalized_advantage_estimate(*args, done, terminated)

        assert torch.autograd.gradcheck(estimate, (gamma, lmbda, *floats))

    def test_gradient_on_the_device(self, device):
        value, next_value, reward, done, terminated = signals(2, 7, device=device)
        value.requires_grad_()
        advantage, _ = generalized_advantage_estimate(0.9, 0.8, value, next_value, reward, done, terminated)
        advantage.sum().backward()
        assert value.grad.isfinite().all()

    @pytest.mark.parametrize("number", [0.9, torch.tensor(0.9)])
    def test_compiles_without_a_break(self, number, device):
        number = number.to(device) if isinstance(number, torch.Tensor) else number
        tensors = signals(3, 9, device=device)
        compiled = torch.compile(generalized_advantage_estimate, fullgraph=True, backend="eager")
        for ours, want in zip(
            compiled(number, 0.8, *tensors), generalized_advantage_estimate(number, 0.8, *tensors), strict=True
        ):
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


class TestTDLambda:
    @pytest.mark.parametrize(("n", "t"), [(1, 1), (3, 8), (40, 70)])
    @pytest.mark.parametrize("lmbda", [0.0, 0.8, 1.0])
    def test_equals_torchrl(self, n, t, lmbda, device):
        _, *tensors = signals(n, t, device=device)
        ours = td_lambda_targets(0.9, lmbda, *tensors)
        theirs = reference.td_lambda_return_estimate(0.9, lmbda, *tensors)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_hand_computed(self, device):
        reward, next_value = column([1.0, 2.0, 3.0], device), column([4.0, 8.0, 2.0], device)
        done, never = column([False, True, False], device), column([False] * 3, device)
        truncated = td_lambda_targets(0.5, 0.5, next_value, reward, done, never).flatten().tolist()
        assert truncated == [1 + 0.5 * (0.5 * 4 + 0.5 * 6), 2 + 0.5 * 8, 3 + 0.5 * 2]
        assert td_lambda_targets(0.5, 0.5, next_value, reward, done).flatten().tolist() == [2.5, 2.0, 4.0]

    def test_a_terminated_steps_next_value_reaches_nothing(self, device):
        reward, next_value = column([1.0] * 3, device), column([0.0, NAN, 0.0], device)
        targets = td_lambda_targets(0.9, 0.9, next_value, reward, column([False, True, False], device))
        torch.testing.assert_close(targets.flatten().cpu(), torch.tensor([1.81, 1.0, 1.0]))


class TestVTrace:
    @pytest.mark.parametrize(("n", "t"), [(1, 1), (3, 8), (40, 70)])
    @pytest.mark.parametrize("threshold", [(1.0, 1.0), (2.0, 0.7), (torch.tensor(1.5), torch.tensor(0.9))])
    def test_equals_torchrl(self, n, t, threshold, device):
        tensors = signals(n, t, device=device)
        log_pi, log_mu = torch.randn(2, n, t, 1, device=device).unbind(0)
        rho, c = threshold
        ours = vtrace_advantage_estimate(0.9, log_pi, log_mu, *tensors, rho_thresh=rho, c_thresh=c)
        theirs = reference.vtrace_advantage_estimate(0.9, log_pi, log_mu, *tensors, rho_thresh=rho, c_thresh=c)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_on_policy_targets_are_one_lambda_returns(self, device):
        tensors = signals(4, 20, device=device)
        same = torch.randn(4, 20, 1, device=device)
        _, target = vtrace_advantage_estimate(0.9, same, same, *tensors)
        torch.testing.assert_close(target, generalized_advantage_estimate(0.9, 1.0, *tensors)[1], rtol=1e-4, atol=1e-5)

    def test_bad_numbers_stay_in_their_episode(self, device):
        value, end = column([0.0] * 4, device), column([False, True, False, False], device)
        log_pi = column([0.0, 0.0, NAN, 0.0], device)
        next_value = column([0.0, NAN, 0.0, 0.0], device)
        advantage, target = vtrace_advantage_estimate(0.9, log_pi, value, value, next_value, value + 1, end)
        torch.testing.assert_close(target.flatten().cpu(), torch.tensor([1.9, 1.0, NAN, 1.0]), equal_nan=True)
        torch.testing.assert_close(advantage.flatten().cpu(), torch.tensor([1.9, 1.0, NAN, 1.0]), equal_nan=True)


class TestErrors:
    def test_shapes_are_named(self):
        value, next_value, reward, done, terminated = signals(2, 3)
        with pytest.raises(ValueError, match=r"reward \[2, 2, 1\] float32 cpu.*done \[2, 3, 1\] bool"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value, reward[:, :2], done, terminated)
        with pytest.raises(ValueError, match=r"next_state_value \[2, 1, 1\]"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value[:, :1], reward, done, terminated)
        # Time at the agents' dimension: the flags do not fit, and nothing is silently computed over agents.
        value, next_value, reward, _, _ = signals(2, 3, features=(4, 1))
        with pytest.raises(ValueError, match="time_dim=-2"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value, reward, done, terminated)

    def test_types_and_devices_are_named(self):
        value, next_value, reward, done, terminated = signals(2, 3)
        with pytest.raises(TypeError, match=r"done \[2, 3, 1\] float32.*\.bool\(\)"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value, reward, done.float(), terminated)
        with pytest.raises(TypeError, match=r"reward \[2, 3, 1\] int64"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value, reward.long(), done, terminated)
        with pytest.raises(ValueError, match="one device"):
            generalized_advantage_estimate(0.9, 0.9, value, next_value, reward.to("meta"), done, terminated)

    def test_dimensions_and_numbers(self):
        tensors = signals(2, 3)
        with pytest.raises(ValueError, match="time_dim"):
            generalized_advantage_estimate(0.9, 0.9, *tensors, time_dim=-4)
        with pytest.raises(ValueError, match=r"number \[5\] float32"):
            generalized_advantage_estimate(torch.ones(5), 0.9, *tensors)
        with pytest.raises(ValueError, match="at least one step"):
            generalized_advantage_estimate(0.9, 0.9, *[x[:, :0] for x in tensors])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of make_dual
@pytest.mark.parametrize("terminates", [False, True])
def test_transforms_of_torch_differentiate_advantages(terminates):
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(3, 3, 17, 1, dtype=torch.float64, generator=generator) for _ in range(2))
    done = torch.rand(3, 17, 1, generator=generator) < 0.2
    terminated = done & (torch.rand(3, 17, 1, generator=generator) < 0.5) if terminates else None

    def of(inputs):
        return generalized_advantage_estimate(0.9, 0.8, *inputs, done, terminated)[0]

    # linear in all inputs
    _, tangent = torch.func.jvp(of, (one,), (other,))
    torch.testing.assert_close(tangent, of(other))
    with torch.autograd.forward_ad.dual_level():
        dual = of(torch.autograd.forward_ad.make_dual(one, other))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    torch.testing.assert_close(torch.func.vmap(of)(torch.stack([one, other]))[1], of(other))


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA."""

    @property
    def is_cuda(self):
        return True


def test_no_kernel_leaves_tangents_behind(monkeypatch):
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    logits, params = torch.zeros(5, 12).as_subclass(OnCuda), [torch.zeros(64, 64), torch.zeros(64), torch.zeros(2, 64)]
    asked = [
        lambda: kernels.has_scan_kernels(logits),
        lambda: atoms.fusable(logits, 3, 4),
        lambda: implicit.fusable(torch.zeros(5, 64).as_subclass(OnCuda), params),
    ]
    assert all(ask() for ask in asked)
    with torch.autograd.forward_ad.dual_level():
        assert not any(ask() for ask in asked)
