"""EpisodeColumns: a loop over episodes, windows, batches of any cut, resume, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.durotaxis.evaluation import EpisodeColumns

N, T = 3, 7


def make(window=4, device="cpu"):
    return EpisodeColumns(N, totals=("return", "bonus"), ends=("success",), device=device, window=window)


def batch(seed, steps=T, rate=0.3):
    generator = torch.Generator().manual_seed(seed)
    totals = torch.randint(-4, 5, (N, steps, 2), generator=generator).float()
    ends = torch.randint(0, 2, (N, steps, 1), generator=generator).float()
    return totals, ends, torch.rand(N, steps, 1, generator=generator) < rate


class Loop:
    """The same, episode by episode."""

    def __init__(self, window):
        self.window, self.running, self.finished = window, [[0.0, 0.0] for _ in range(N)], []

    def update(self, totals, ends, done):
        for t in range(done.shape[1]):
            for n in range(N):
                self.running[n] = [a + float(b) for a, b in zip(self.running[n], totals[n, t], strict=True)]
                if done[n, t, 0]:
                    self.finished.append([*self.running[n], float(ends[n, t, 0])])
                    self.running[n] = [0.0, 0.0]

    def means(self):
        last = self.finished[-self.window :]
        return {
            name: sum(row[column] for row in last) / len(last) if last else float("nan")
            for column, name in enumerate(("return", "bonus", "success"))
        }


@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 9),
    cut=st.integers(1, T),
    rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_a_loop_over_episodes(seed, window, cut, rate):
    ours, loop = make(window), Loop(window)
    for number in range(3):
        parts = batch(seed + number, rate=rate)
        for piece in zip(*(part.split(cut, 1) for part in parts), strict=True):
            ours.update(*piece)
        loop.update(*parts)
    found, expected = ours.means(), loop.means()
    assert int(ours.count) == len(loop.finished)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, nan_ok=True)


def test_by_hand():
    columns = EpisodeColumns(1, totals=("return",), ends=("success",), device="cpu", window=2)
    assert columns.means()["success"].isnan()
    done = torch.tensor([[[False], [True], [True], [False]]])
    columns.update(torch.tensor([[[1.0], [2.0], [5.0], [9.0]]]), torch.tensor([[[1.0], [0.0], [1.0], [1.0]]]), done)
    # the episodes 1 + 2 without and 5 with success; the 9 belongs to the next one
    assert {name: float(value) for name, value in columns.means().items()} == {"return": 4.0, "success": 0.5}
    columns.update(torch.tensor([[[1.0]]]), torch.tensor([[[1.0]]]), torch.tensor([[[True]]]))
    assert {name: float(value) for name, value in columns.means().items()} == {"return": 7.5, "success": 1.0}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_waits_for_the_host(device):
    columns, parts = make(device=device), [part.to(device) for part in batch(0)]
    with no_host_sync(device):
        columns.update(*parts)
        columns.means()


def test_it_goes_on_bitwise():
    whole, first, second = make(), make(), make()
    for columns in (whole, first):
        columns.update(*batch(0))
    second.load_state_dict(first.state_dict())
    for columns in (whole, second):
        columns.update(*batch(1))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())


class TestRefusals:
    def test_settings(self):
        with pytest.raises(ValueError, match="window >= 1 and names that differ, received num_envs=3, window=0"):
            make(window=0)
        with pytest.raises(ValueError, match="names that differ"):
            EpisodeColumns(1, totals=("one",), ends=("one",), device="cpu")

    def test_shapes(self):
        totals, ends, done = batch(0)
        with pytest.raises(ValueError, match=r"expected shapes \[\(3, 7, 2\), .*received \[\(3, 7, 1\)"):
            make().update(totals[..., :1], ends, done)

    def test_another_window(self):
        with pytest.raises(ValueError, match=r"load_state_dict: expected shapes .*'ring': \[4, 3\].*received"):
            make().load_state_dict(make(window=5).state_dict())
