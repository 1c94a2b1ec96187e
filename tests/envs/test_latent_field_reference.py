"""LatentField against theory: radii, periods, fixed points, statistics of the noise; a scalar twin of every field."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_perf.envs import LatentField
from torchrl_perf.envs.latent_field import (
    FIELDS,
    MultiAttractor,
    ObservationMap,
    double_limit_cycle,
    duffing,
    flow,
    limit_cycle,
    snowman,
    van_der_pol,
)

F64 = torch.float64


def point(*numbers):
    return torch.tensor(numbers, dtype=F64)


def follow(field, z, dt, steps, integrator="euler", substeps=1):
    """The trajectory [steps + 1, *, 2]."""
    path = [z]
    for _ in range(steps):
        path.append(flow(field, path[-1], 0.0, dt, integrator=integrator, substeps=substeps))
    return torch.stack(path)


def turning(path, dt):
    """Mean angular speed around the origin."""
    angle = torch.atan2(path[..., 1], path[..., 0])
    turned = torch.remainder(angle.diff(dim=0) + math.pi, 2 * math.pi) - math.pi
    return float(turned.mean()) / dt


def period(path, dt):
    """Time between the last two upward crossings of x = 0, interpolated."""
    x = path[:, 0]
    index = ((x[:-1] < 0) & (x[1:] >= 0)).nonzero().squeeze(-1)
    times = index + x[index] / (x[index] - x[index + 1])
    return float(times[-1] - times[-2]) * dt


# -- the fields, one number at a time ----------------------------------------------------------------------------------


def scalar_field(name, x, y):
    r2 = x * x + y * y
    if name == "limit_cycle":
        return x * (1 - r2) - y, y * (1 - r2) + x
    if name == "double_limit_cycle":
        r = math.sqrt(r2)
        return x * (1 - r) - y * (2 - r), y * (1 - r) + x * (2 - r)
    if name == "van_der_pol":
        return y, (1 - x * x) * y - x
    if name == "duffing":
        return y, -0.1 * y - x * (-0.1 + 0.1 * x * x)
    share = 1 / (1 + math.exp(-10 * x))
    right, left = scalar_field("limit_cycle", x - 1, y), scalar_field("limit_cycle", x + 1, -y)  # mirrored below
    return share * right[0] + (1 - share) * left[0], share * right[1] - (1 - share) * left[1]


def scalar_step(name, x, y, push, h, integrator):
    def velocity(x, y):
        u, v = scalar_field(name, x, y)
        return u + push[0], v + push[1]

    u1, v1 = velocity(x, y)
    if integrator == "euler":
        return x + h * u1, y + h * v1
    u2, v2 = velocity(x + h / 2 * u1, y + h / 2 * v1)
    u3, v3 = velocity(x + h / 2 * u2, y + h / 2 * v2)
    u4, v4 = velocity(x + h * u3, y + h * v3)
    return x + h / 6 * (u1 + 2 * u2 + 2 * u3 + u4), y + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"multi_attractor"}))
@settings(max_examples=15, deadline=None)
@given(
    st.floats(-2, 2), st.floats(-2, 2), st.floats(-1, 1), st.floats(-1, 1), st.sampled_from(["euler", "rk4"]),
    st.integers(1, 3),
)  # fmt: skip
def test_a_step_equals_its_scalar_twin(name, x, y, push_x, push_y, integrator, substeps):
    field, push = FIELDS[name][0], (push_x, push_y)
    ours = flow(field, point(x, y), point(*push), 0.1, integrator=integrator, substeps=substeps)
    for _ in range(substeps):
        x, y = scalar_step(name, x, y, push, 0.1 / substeps, integrator)
    torch.testing.assert_close(ours, point(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", [(0.3, -1.2), (1.99, 1.99), (-2.0, 2.0), (0.0, 0.0), (3.0, -5.0)])
def test_multi_attractor_is_interpolated(place):
    field = MultiAttractor(9, seed=3, dtype=F64)
    table, (x, y) = field.table[0], (min(max(c, -2.0), 2.0) for c in place)
    column, row = (x + 2) / 0.5, (y + 2) / 0.5
    i, j = min(int(row), 7), min(int(column), 7)
    a, b = row - i, column - j
    expected = (1 - a) * ((1 - b) * table[:, i, j] + b * table[:, i, j + 1])
    expected = expected + a * ((1 - b) * table[:, i + 1, j] + b * table[:, i + 1, j + 1])
    torch.testing.assert_close(field(point(*place)), expected + point(x - place[0], y - place[1]))


# -- radii, periods, fixed points --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "w"), [(1.0, 1.0), (0.5, 2.0)])
def test_hopf_normal_form(d, w):
    path = follow(partial(limit_cycle, d=d, w=w), point(0.2, -0.1), 0.1, 400, "rk4")[200:]
    assert path.norm(dim=-1).mean().item() == pytest.approx(math.sqrt(d), abs=1e-4)
    assert turning(path, 0.1) == pytest.approx(w, abs=1e-4)


@pytest.mark.parametrize(("d", "w"), [(1.0, 1.0), (2.0, 1.5)])
def test_hopf_normal_form_under_euler(d, w):
    path = follow(partial(limit_cycle, d=d, w=w), point(0.2, -0.1), 0.1, 500)[300:]
    radius = math.sqrt(d + (1 - math.sqrt(1 - (w * 0.1) ** 2)) / 0.1)
    torch.testing.assert_close(path.norm(dim=-1), torch.full((201,), radius, dtype=F64), rtol=1e-6, atol=0.0)
    assert turning(path, 0.1) == pytest.approx(math.asin(w * 0.1) / 0.1, abs=1e-6)
    if d == w == 1.0:
        assert radius == pytest.approx(1.02476, abs=5e-6)
        assert turning(path, 0.1) == pytest.approx(1.0017, abs=5e-5)


@pytest.mark.parametrize("start", [(0.1, 0.0), (3.5, 0.0)])
def test_double_limit_cycle_has_one_stable_radius(start):
    path = follow(partial(double_limit_cycle, d=1.2, w=1.5), point(*start), 0.05, 800, "rk4")[400:]
    torch.testing.assert_close(path.norm(dim=-1), torch.full((401,), 1.2, dtype=F64), rtol=1e-4, atol=0.0)
    assert turning(path, 0.05) == pytest.approx(1.5 * 1.2, abs=1e-3)


def test_van_der_pol_amplitude_and_period():
    path = follow(van_der_pol, point(2.0, 0.0), 0.1, 400, "rk4", substeps=2)
    assert path[200:, 0].max().item() == pytest.approx(2.0086, abs=2e-3)
    assert period(path, 0.1) == pytest.approx(6.6633, abs=1e-3)


@pytest.mark.parametrize(
    ("dt", "amplitude", "time"), [(0.1, 2.217, 7.27), (0.01, 2.028, 6.714), (0.001, 2.0105, 6.668)]
)
def test_van_der_pol_under_euler(dt, amplitude, time):
    steps = round((40.0 if dt == 0.1 else 20.5) / dt)  # begun near the cycle, which it reaches within one period
    path = follow(van_der_pol, point(amplitude, 0.0), dt, steps)
    assert path[steps // 2 :, 0].max().item() == pytest.approx(amplitude, rel=1e-3)
    assert period(path, dt) == pytest.approx(time, rel=1e-3)


def test_duffing_comes_to_rest_in_two_wells():
    z = torch.tensor([[0.3, 0.0], [-0.3, 0.0], [1.5, 0.2], [-1.5, -0.2]], dtype=F64)
    last = follow(duffing, z, 0.1, 1500)[-1]
    assert last[:, 1].abs().max() < 0.01
    torch.testing.assert_close(last[:, 0].abs(), torch.ones(4, dtype=F64), rtol=0.01, atol=0.0)
    assert set(last[:, 0].sign().tolist()) == {-1.0, 1.0}
    wells = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=F64)
    torch.testing.assert_close(duffing(wells), torch.zeros_like(wells))
    torch.testing.assert_close(duffing(point(math.sqrt(2.0), 0.0), b=-0.2, c=0.1), torch.zeros(2, dtype=F64))
    away = follow(partial(duffing, a=0.1), point(0.5, 0.0), 0.1, 1000)[-1].norm()
    assert not away < 5  # not damped, it runs away, to NaN in the end


def test_snowman_turns_in_opposite_senses():
    z = torch.tensor([[1.5, 0.2], [-1.5, 0.2], [0.05, 0.3], [-0.05, 0.3]], dtype=F64)
    path = follow(snowman, z, 0.1, 600, "rk4")[300:]
    assert (path[:, 0::2, 0] > 0).all() and (path[:, 1::2, 0] < 0).all()
    centres = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64).repeat(2, 1)
    arm, step = (path - centres)[:-1], path.diff(dim=0)
    assert (arm[..., 0] * step[..., 1] - arm[..., 1] * step[..., 0]).mean(0).sign().tolist() == [1, -1, 1, -1]
    far = (path[..., 0].abs() > 0.7).to(F64)
    radius = ((path - centres).norm(dim=-1) * far).sum(0) / far.sum(0)
    torch.testing.assert_close(radius, torch.ones(4, dtype=F64), rtol=0.03, atol=0.0)
    torch.testing.assert_close(path[:, 0] * point(-1, 1), path[:, 1])  # mirror images


def test_multi_attractor_has_attractors_and_keeps_what_follows_it():
    z = torch.cartesian_prod(*[torch.linspace(-3, 3, 9)] * 2)
    field = MultiAttractor()
    last = follow(field, z, 0.1, 400)[-1]
    assert last.abs().max() < 2.0
    assert (field(last).norm(dim=-1) < 1e-2).all()
    assert 2 <= len({(round(x, 1), round(y, 1)) for x, y in last.tolist()}) <= 8
    assert torch.equal(field.table, MultiAttractor(seed=0).table)
    assert not torch.equal(field.table, MultiAttractor(seed=1).table)


# -- noise -------------------------------------------------------------------------------------------------------------


def one_step(env, action):
    state = {name: value.clone() for name, value in env._state().items()}
    td = TensorDict({"action": action}, batch_size=[env.num_envs], device=env.device)
    return state, env.step(td)["next"]


def test_process_noise(device):
    n = 20_000
    env = LatentField(n, process_noise=0.1, noise="none", device=device, dtype=F64, seed=0)
    action = torch.full((n, 2), 0.05, dtype=F64, device=device)
    state, step = one_step(env, action)
    z = state["latent"]
    rest = step["latent"] - z - (limit_cycle(z) + action) * 0.1
    sigma = math.sqrt(0.1 * 0.1)
    assert abs(rest.std().item() / sigma - 1) < 3 / math.sqrt(2 * 2 * n)
    assert abs(rest.mean().item()) < 4 * sigma / math.sqrt(2 * n)
    assert abs((rest[:, 0] * rest[:, 1]).mean().item()) < 4 * sigma**2 / math.sqrt(n)


def test_gaussian_observations(device):
    n = 4000
    env = LatentField(n, observation="linear", noise="gaussian", observation_std=0.3, device=device, seed=0)
    _, step = one_step(env, torch.zeros(n, 2, device=device))
    rest = step["observation"] - env.observation_map(step["latent"])
    assert abs(rest.std().item() / 0.3 - 1) < 3 / math.sqrt(2 * 20 * n)
    assert abs(rest.mean().item()) < 4 * 0.3 / math.sqrt(20 * n)


def test_poisson_observations(device):
    n = 4000
    env = LatentField(n, device=device, seed=0)
    _, step = one_step(env, torch.zeros(n, 2, device=device))
    counts, rate = step["observation"].double(), env.observation_map(step["latent"]).double()
    assert torch.equal(counts, counts.round()) and (counts >= 0).all()
    total = rate.sum().item()
    assert abs(counts.sum().item() - total) < 4 * math.sqrt(total)
    index = ((counts - rate) ** 2 / rate).mean().item()  # variance is the mean
    assert index == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_mean_rate_over_the_circle(rate):
    maps = ObservationMap("log_linear", 20, rate=rate, radius=1.3, dtype=F64)
    angle = torch.arange(360, dtype=F64) / 180 * math.pi
    mean = maps(1.3 * torch.stack((angle.cos(), angle.sin()), -1))
    assert mean.mean().item() == pytest.approx(rate)
    torch.testing.assert_close(
        ObservationMap("log_linear", 3, rate=rate, dtype=F64, seed=5)(torch.zeros(1, 2, dtype=F64)).expand(2, 3),
        torch.exp(ObservationMap("log_linear", 3, rate=rate, dtype=F64, seed=5).bias).mul(0.1).expand(2, 3),
    )


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_mean_rate_on_the_way(field):
    env = LatentField(200, field=field, seed=0)
    td, counts = env._reset(None), []
    for _ in range(150):
        _, td = env.step_and_maybe_reset(td.set("action", torch.zeros(200, 2)))
        counts.append(td["observation"].mean())
    assert 0.5 < torch.stack(counts)[50:].mean().item() < 2.0


def test_maps_by_hand():
    z = torch.tensor([[0.5, -1.0]], dtype=F64)
    linear = ObservationMap("linear", 3, seed=1, dtype=F64)
    torch.testing.assert_close(linear(z), z @ linear.weight.T)
    log_linear = ObservationMap("log_linear", 3, seed=1, dt=0.2, dtype=F64)
    torch.testing.assert_close(log_linear(z), 0.2 * torch.exp(z @ linear.weight.T + log_linear.bias))
    mlp = ObservationMap("mlp", 3, seed=1, dtype=F64)
    hidden = torch.tanh(z @ mlp.inner_weight.T + mlp.inner_bias)
    torch.testing.assert_close(mlp(z), hidden @ mlp.weight.T)
    assert torch.equal(ObservationMap("identity", 2)(z), z)
    many = ObservationMap("linear", 5000, dtype=F64).weight
    assert many.var().item() == pytest.approx(0.5, rel=0.05)
