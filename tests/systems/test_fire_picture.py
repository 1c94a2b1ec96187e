"""Maps of breaks and of where fires burn, and their picture."""

import subprocess
import sys

import pytest
import torch

from torchrl_perf.envs import FuelBreaks, Landscape
from torchrl_perf.envs.fuel_breaks import column_breaks
from torchrl_perf.systems.fuel_breaks import draw_fire_maps, fire_maps, record_breaks


def hilly(**more):
    land = Landscape.fractal(3, (6, 9), count=2, wind=(4.0, 2.0), bare=0.1)
    return FuelBreaks(3, landscape=land, budget=5, seed=0, **more)


def test_breaks_of_an_episode():
    env = FuelBreaks(2, size=(3, 4), budget=3)
    step = iter((0, 5, 11))
    breaks, number = record_breaks(env, lambda td: td.set("action", torch.full((2,), next(step))))
    assert breaks.int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]] * 2
    assert number.tolist() == [[0], [0]]


@pytest.mark.parametrize("mode", ["sequential", "one_shot"])
def test_random_breaks_of_an_episode(mode):
    env = hilly(mode=mode)
    breaks, number = record_breaks(env)
    assert (breaks.sum((1, 2)) == 5).all()
    assert not (breaks & ~env.burnable(number)).any()


def test_maps_are_of_the_same_fires():
    env = hilly()
    column = column_breaks(env.burnable(), env.budget)[1]
    none, one, again = fire_maps(
        env, {"none": column & False, "column": column, "again": column.unsqueeze(0)}, landscape_id=1, fires=100
    )
    assert (none.name, one.name, one.fires) == ("none", "column", 128)
    assert torch.equal(one.probability, again.probability)
    assert one.burned == again.burned < none.burned
    assert (one.probability[column] == 0).all()
    assert torch.equal(one.burnable, env.burnable()[1])
    assert one.wind == pytest.approx((4.0, 2.0))
    assert one.probability.mean().item() == pytest.approx(one.burned)
    found = env.assess(column.unsqueeze(0), landscape_id=torch.tensor([1]), fires=100)
    assert (one.burned, one.error) == pytest.approx((float(found.burned), float(found.error)))


@pytest.mark.parametrize("name", ["maps.png", "maps.svg"])
def test_picture(tmp_path, name):
    env = hilly()
    breaks = record_breaks(env)[0]
    maps = fire_maps(env, {"random": breaks[0], "none": breaks[0] & False}, fires=64)
    path = draw_fire_maps(maps, tmp_path / name)
    assert path == tmp_path / name
    data = path.read_bytes()
    assert len(data) > 10_000
    assert data.startswith(b"\x89PNG") or b"<svg" in data


def test_what_is_drawn(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    env = FuelBreaks(1, size=(4, 6), budget=2)
    breaks = torch.zeros(4, 6, dtype=torch.bool)
    breaks[1, 4] = True
    (part,) = fire_maps(env, {"one": breaks}, fires=64)
    draw_fire_maps([part], tmp_path / "maps.png", title="a title")
    above, below = drawn[0].axes[:2]
    assert above.get_title() == "one: 1 breaks"
    assert below.get_title() == f"burned {part.burned:.3f} ± {part.error:.3f}"
    assert drawn[0].get_suptitle() == "a title"
    for axes, values in ((above, part.fuel), (below, part.probability)):
        torch.testing.assert_close(torch.as_tensor(axes.images[0].get_array().data), values)
        (square,) = axes.collections[0].get_paths()
        assert square.get_extents().bounds == (3.5, 0.5, 1.0, 1.0)  # column 4, row 1


@pytest.mark.parametrize("size", [1, (1, 4), (4, 1)])
def test_small_landscapes(tmp_path, size):
    land = Landscape.fractal(0, size, bare=0.0)
    env = FuelBreaks(1, landscape=land, budget=1)
    assert draw_fire_maps(fire_maps(env, {"all": record_breaks(env)[0][0]}, fires=64), tmp_path / "maps.png").exists()


def test_matplotlib_is_imported_when_drawing():
    code = "import sys, torchrl_perf.systems.fuel_breaks.picture; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_bad_arguments(tmp_path):
    env = hilly()
    fits = torch.zeros(6, 9, dtype=torch.bool)
    with pytest.raises(IndexError, match="landscape_id: expected one of the env's 2, received 2"):
        fire_maps(env, {"none": fits}, landscape_id=2)
    with pytest.raises(ValueError, match=r"placements\['none'\]: expected breaks \[6, 9\], received \[9, 6\]"):
        fire_maps(env, {"none": fits.T})
    with pytest.raises(ValueError, match="placements: expected at least one, received none"):
        fire_maps(env, {})
    with pytest.raises(ValueError, match="maps: expected at least one, received none"):
        draw_fire_maps([], tmp_path / "maps.png")


def test_a_map_without_breaks_gives_a_row_of_changes(tmp_path):
    import matplotlib.image

    env = hilly()
    breaks = record_breaks(env)[0][0]
    with_none = fire_maps(env, {"random": breaks, "none": breaks & False}, fires=64)
    sizes = [
        matplotlib.image.imread(draw_fire_maps(maps, tmp_path / f"{len(maps)}{number}.png")).shape[0]
        for number, maps in enumerate((with_none, with_none[:1], with_none[1:]))
    ]
    assert sizes[0] > 1.3 * sizes[1] == 1.3 * sizes[2]
