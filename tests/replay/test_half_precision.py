"""Priorities, exponents, masks and rewards in every precision: the same distribution, products in float32."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.replay import DevicePrioritizedSampler, DeviceReplayBuffer, DeviceStorage, make_replay_buffer

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def batch(N=2, T=8, dtype=torch.float32):
    no = torch.zeros(N, T, 1, dtype=torch.bool)
    following = {"reward": torch.rand(N, T, 1).to(dtype), "done": no, "terminated": no.clone()}
    return TensorDict({"number": torch.arange(N * T).view(N, T, 1), "next": following}, [N, T])


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", ["prioritized", "slice"])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_priorities_are_drawn_in_proportion(dtype, sampler, alpha):
    """1e6 draws from 500 rows; 1e-4 of the mass is lost where sums are made in half precision."""
    torch.manual_seed(0)
    rows, draws = 500, 10**6
    options = {"slice_len": 1} if sampler == "slice" else {}
    rb = make_replay_buffer(rows, sampler=sampler, alpha=torch.tensor(alpha).to(torch.float64), beta=1.0, **options)
    rb.extend(batch(1, rows))
    priority = (0.5 + torch.rand(rows)).to(dtype)
    rb.update_priority(torch.arange(rows), priority)
    index, info = rb.sampler.sample(rb.storage, draws)
    weight = priority.double() ** alpha
    share = weight / weight.sum()
    statistic = chi_square(index.bincount(minlength=rows).double(), share * draws)
    assert statistic < 499 + 5 * (2 * 499) ** 0.5
    expected = (weight / weight.min()) ** -1
    torch.testing.assert_close(info["priority_weight"].double(), expected[index], rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_of_any_dtype(dtype):
    alpha, beta = torch.tensor(0.5, dtype=dtype), torch.tensor(0.25, dtype=dtype)
    sampler = DevicePrioritizedSampler(alpha=alpha, beta=beta)
    rb = DeviceReplayBuffer(storage=DeviceStorage(16), sampler=sampler, batch_size=64)
    rb.extend(batch())
    rb.update_priority(torch.arange(16), torch.full((16,), 9.0, dtype=dtype))
    assert rb.sampler.tree.weights.eq(3).all()
    sampler.beta = torch.tensor(1.0, dtype=dtype)
    sampler.alpha = torch.tensor(1.0, dtype=dtype)
    torch.testing.assert_close(rb.sampler.tree.weights, torch.full((16,), 9.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
@pytest.mark.parametrize("sampler", ["random", "prioritized", "slice"])
def test_masks_and_ends_of_any_dtype(dtype, sampler):
    options = {"slice_len": 2} if sampler == "slice" else {}
    rb = make_replay_buffer(16, batch_size=16, sampler=sampler, mask_key="mask", **options)
    td = batch()
    td["mask"] = (torch.arange(16).view(2, 8, 1) % 8 > 1).to(dtype)
    if sampler == "slice":
        td["next", "done"] = (torch.arange(16).view(2, 8, 1) % 8 == 4).to(dtype)
    rb.extend(td)
    numbers = torch.cat([rb.sample()["number"] for _ in range(20)]).flatten()
    assert set((numbers % 8).tolist()) == set(range(2, 8))
    if sampler == "slice":
        assert not (numbers.view(-1, 2)[:, 0] % 8 == 4).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [0.97, torch.tensor(0.97, dtype=torch.float64)])
def test_n_step_returns_are_summed_in_float32(dtype, gamma):
    rb = make_replay_buffer(400, n_step=100, gamma=gamma)
    td = batch(2, 200, dtype)
    rb.extend(td)
    sample = rb.storage.get(rb.storage.ring.slots(200)[:, :50])
    powers = 0.97 ** torch.arange(100, dtype=torch.float64)
    windows = td["next", "reward"].squeeze(-1).double().unfold(1, 100, 1)[:, :50]
    exact = (windows * powers).sum(-1)
    received = sample["next", "reward"].squeeze(-1)
    assert received.dtype == dtype
    torch.testing.assert_close(received.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [0.97, torch.tensor(0.97, dtype=torch.float64)])
def test_powers_of_gamma_are_as_exact_as_the_rewards(dtype, gamma):
    rb = make_replay_buffer(16, n_step=5, gamma=gamma)
    rb.extend(batch(dtype=dtype))
    rows = rb[:]
    exact = 0.97 ** rows["steps_to_next_obs"].double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert rows["gamma"].dtype == wide
    torch.testing.assert_close(rows["gamma"], exact.to(wide), rtol=2 * torch.finfo(wide).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_priorities_of_the_loss_under_autocast(dtype):
    rb = make_replay_buffer(16, batch_size=16, sampler="prioritized", alpha=1.0)
    rb.extend(batch())
    sample = rb.sample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rb.update_tensordict_priority(sample.set("td_error", torch.full((16, 1), 3.0, dtype=dtype)))
        weight = rb.sample()["priority_weight"]
    assert weight.dtype == torch.float32
    assert rb.sampler.tree.weights[sample["index"]].eq(3).all()
