"""Our replay with TorchRL's samplers, writers and storages, which ``tests/replay`` runs, and with its transforms."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from cells import Cell, fixed_seed, no_cells_twice
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import transforms as T

from torchrl_perf.replay import DeviceRandomSampler, DeviceReplayBuffer, DeviceStorage, DeviceWriter, make_replay_buffer

RING, FOREIGN = "Our storage below TorchRL's samplers and writers", "TorchRL's storages below our samplers and writer"
TRANSFORMED = "Our replay and TorchRL's transforms"
N, STEPS, CAPACITY, GAMMA = 2, 6, 40, 0.5


def _matrix() -> ModuleType:
    """The table of the tests of replay."""
    path = Path(__file__).resolve().parents[1] / "replay" / "torchrl_matrix.py"
    spec = importlib.util.spec_from_file_location("replay_matrix_of_the_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it here
    spec.loader.exec_module(module)
    return module


def _elsewhere(cells: list, table: str, row: Callable, column: Callable) -> list[Cell]:
    """The combinations as cells of two names; those that differ in the buffer alone are one, and agree."""
    found: dict[tuple[str, str], str] = {}
    for cell in cells:
        place = row(cell), column(cell)
        reason = cell.refused or ""
        assert found.setdefault(place, reason) == reason, f"{place}: buffers differ"
    return [Cell(table, *place, _not_here, reason, elsewhere=True) for place, reason in found.items()]


def _not_here() -> None:
    raise AssertionError("run by tests/replay/test_torchrl_matrix.py")


def rows() -> TensorDict:
    """``[2, 6]``: env n's row t observes ``10 n + t`` and pays ``t + 1``; an episode ends after row 3 of env 0."""
    number = torch.arange(N)[:, None] * 10.0 + torch.arange(STEPS)
    done = torch.zeros(N, STEPS, 1, dtype=torch.bool)
    done[0, 3] = True
    pixels = (number[..., None, None, None].expand(N, STEPS, 4, 4, 3) * 10).to(torch.uint8)
    return TensorDict(
        {
            "observation": number.unsqueeze(-1),
            "pixels": pixels,
            "next": {
                "observation": number.unsqueeze(-1) + 1,
                "reward": torch.arange(1.0, STEPS + 1).expand(N, STEPS).unsqueeze(-1).clone(),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [N, STEPS],
        names=[None, "time"],
    )


def _index(sample: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Env and step of each row."""
    number = sample["observation"].reshape(-1).round().long()
    return number // 10, number % 10


def _scaled(sample: TensorDict) -> None:
    _, step = _index(sample)
    assert torch.equal(sample["next", "reward"].reshape(-1), 1.0 + 2.0 * (step + 1))


def _clipped(sample: TensorDict) -> None:
    _, step = _index(sample)
    assert torch.equal(sample["next", "reward"].reshape(-1), (step + 1.0).clamp(max=2.5))


def _signs(sample: TensorDict) -> None:
    assert torch.equal(sample["next", "reward"], torch.ones_like(sample["next", "reward"]))


def _normed(sample: TensorDict) -> None:
    env, step = _index(sample)
    assert torch.equal(sample["normed"].reshape(-1), (10.0 * env + step - 1.0) / 2.0)


def _image(sample: TensorDict) -> None:
    env, step = _index(sample)
    assert sample["image"].shape == (*sample.shape, 3, 4, 4)
    torch.testing.assert_close(sample["image"][..., 0, 0, 0].reshape(-1), (10.0 * env + step) * 10 / 255)


def _doubled(sample: TensorDict) -> None:
    assert sample["observation"].dtype == torch.float64


def _renamed(sample: TensorDict) -> None:
    assert torch.equal(sample["seen"], sample["observation"])


def _without_pixels(sample: TensorDict) -> None:
    assert "pixels" not in sample
    assert "reward" in sample["next"]


def _joined(sample: TensorDict) -> None:
    assert torch.equal(sample["joined"], sample["observation"].expand(*sample.shape, 2))


def _flat(sample: TensorDict) -> None:
    assert sample["flat"].shape == (*sample.shape, 48)


def _as_they_are(sample: TensorDict) -> None:
    _, step = _index(sample)
    assert torch.equal(sample["next", "reward"].reshape(-1), step + 1.0)


def _several(sample: TensorDict) -> None:
    _scaled(sample)
    _normed(sample)


OBSERVATION = ["observation"]
SAMPLED: dict[str, tuple[Callable[[], T.Transform], Callable[[TensorDict], None]]] = {
    "RewardScaling": (lambda: T.RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]), _scaled),
    "RewardClipping": (lambda: T.RewardClipping(0.0, 2.5, in_keys=[("next", "reward")]), _clipped),
    "SignTransform": (lambda: T.SignTransform(in_keys=[("next", "reward")]), _signs),
    "BinarizeReward": (lambda: T.BinarizeReward(in_keys=[("next", "reward")]), _signs),
    "ObservationNorm": (
        lambda: T.ObservationNorm(1.0, 2.0, OBSERVATION, ["normed"], standard_normal=True),
        _normed,
    ),
    "Compose": (
        lambda: T.Compose(
            T.RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]),
            T.ObservationNorm(1.0, 2.0, OBSERVATION, ["normed"], standard_normal=True),
        ),
        _several,
    ),
    "ToTensorImage": (lambda: T.ToTensorImage(in_keys=["pixels"], out_keys=["image"], shape_tolerant=True), _image),
    "DTypeCastTransform": (
        lambda: T.DTypeCastTransform(torch.float32, torch.float64, in_keys=OBSERVATION),
        _doubled,
    ),
    "RenameTransform": (lambda: T.RenameTransform(OBSERVATION, ["seen"], create_copy=True), _renamed),
    "ExcludeTransform": (lambda: T.ExcludeTransform("pixels"), _without_pixels),
    "SelectTransform": (
        lambda: T.SelectTransform("observation", ("next", "reward"), keep_dones=False),
        _without_pixels,
    ),
    "CatTensors": (
        lambda: T.CatTensors(["observation", "again"], "joined", del_keys=False),
        _joined,
    ),
    "FlattenObservation": (lambda: T.FlattenObservation(-3, -1, in_keys=["pixels"], out_keys=["flat"]), _flat),
    "UnsqueezeTransform": (
        lambda: T.UnsqueezeTransform(-1, in_keys=OBSERVATION, out_keys=["deep"]),
        lambda sample: _check(sample["deep"].shape == (*sample.shape, 1, 1)),
    ),
    "FiniteTensorDictCheck": (T.FiniteTensorDictCheck, _as_they_are),
}


def _check(holds: bool) -> None:
    assert holds


BUFFERS: dict[str, Callable[..., ReplayBuffer]] = {
    "make_replay_buffer": lambda **options: make_replay_buffer(CAPACITY, batch_size=8, **options),
    "DeviceReplayBuffer": lambda **options: DeviceReplayBuffer(
        storage=DeviceStorage(CAPACITY), batch_size=8, **options
    ),
    "TensorDictReplayBuffer on DeviceStorage": lambda **options: TensorDictReplayBuffer(
        storage=DeviceStorage(CAPACITY),
        sampler=DeviceRandomSampler(),
        writer=DeviceWriter(),
        batch_size=8,
        **options,
    ),
}


def sampled(buffer: str, transform: str) -> None:
    """The transform's values in samples, given at construction and appended later, of 64 rows."""
    fixed_seed()
    make, check = SAMPLED[transform]
    batch = rows()
    batch["again"] = batch["observation"].clone()
    given, appended = BUFFERS[buffer](transform=make()), BUFFERS[buffer]()
    appended.append_transform(make())
    for each in (given, appended):
        each.extend(batch.clone())
        for _ in range(3):
            sample = each.sample()
            check(sample)
            assert sample.shape == (8,)


def several_steps(buffer: str) -> None:
    """TorchRL's MultiStepTransform of 3 steps before the rows are written."""
    ours, stock = BUFFERS[buffer](), T.MultiStepTransform(n_steps=3, gamma=GAMMA)
    ours.append_transform(stock)
    batch = rows().exclude("pixels")
    expected = T.MultiStepTransform(n_steps=3, gamma=GAMMA)._inv_call(batch.clone())
    ours.extend(batch.clone())
    stored = {float(row["observation"]): row for row in ours[:].reshape(-1)}
    assert len(stored) == expected.numel()
    for row in expected.reshape(-1):
        mine = stored[float(row["observation"])]
        for key in (("next", "reward"), ("next", "observation"), ("next", "done"), "steps_to_next_obs"):
            torch.testing.assert_close(mine[key], row[key], msg=str(key))
    env, step = 0, 2  # by hand: rows 2 and 3, then the end
    row = stored[10.0 * env + step]
    assert float(row["next", "reward"]) == 3.0 + GAMMA * 4.0
    assert float(row["next", "observation"]) == 4.0


MATRIX = _matrix()
CELLS = no_cells_twice(
    _elsewhere(MATRIX.cells_on_our_storage(), RING, lambda cell: cell.sampler, lambda cell: cell.writer)
    + _elsewhere(
        MATRIX.cells_on_storages_of_torchrl(),
        FOREIGN,
        lambda cell: "DeviceWriter" if cell.writer == "DeviceWriter" else cell.sampler,
        lambda cell: cell.storage,
    )
    + [Cell(TRANSFORMED, name, buffer, partial(sampled, buffer, name)) for name in SAMPLED for buffer in BUFFERS]
    + [Cell(TRANSFORMED, "MultiStepTransform", buffer, partial(several_steps, buffer)) for buffer in BUFFERS]
)
