"""The example of a raster of one's own: what is cut out, what burns, and that a search saves more than a column."""

import numpy as np
import pytest
from test_examples import load


def test_it_places_and_draws(tmp_path, capsys):
    example = load("own_landscape")
    picture = tmp_path / "maps.png"
    config = example.Config(size=14, breaks=10, rounds=25, fires=256, base=0.45, picture=picture, device="cpu")
    burned = example.main(config)
    assert burned["search"] < burned["column"] < burned["none"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("none 0.")
    assert lines[1] == f"picture: {picture}"
    assert picture.stat().st_size > 10_000


def test_a_raster_from_a_file(tmp_path):
    example = load("own_landscape")
    heights = np.arange(60.0).reshape(6, 10)
    np.save(tmp_path / "heights.npy", heights)
    config = example.Config(elevation=str(tmp_path / "heights.npy"), size=4)
    cut = example.elevation_of(config)
    assert cut.tolist() == heights[1:5, 3:7].tolist()
    ground = example.landscape_of(cut, config)
    assert not ground.burnable[0, 0, 0] and int(ground.burnable.sum()) == 15
    assert float(ground.vegetation[0, 3, 3]) == pytest.approx(0.4)
