"""RiskDistortion: the functions of a buffer that moves, is stored, and may change."""

import pytest
import torch

from torchrl_perf.functional import Risk, distort
from torchrl_perf.functional.losses.risk import distorted_mass
from torchrl_perf.modules.values.risk import RiskDistortion, make_risk


@pytest.mark.parametrize("risk", [Risk("cvar", 0.3), Risk("wang", -0.5), Risk("power", -2.0)])
def test_it_is_the_functions(risk):
    module, taus = RiskDistortion(risk), torch.rand(2, 5)
    torch.testing.assert_close(module.levels(taus), distort(taus, risk.eta, risk.kind))
    cumulative = torch.linspace(0.1, 1, 10)
    torch.testing.assert_close(module.mass(cumulative), distorted_mass(cumulative, risk.eta, risk.kind))


def test_a_level_for_each_row():
    module = RiskDistortion(Risk("cvar", torch.tensor([0.1, 1.0])))
    assert module.levels(torch.tensor([0.5])).tolist() == [[pytest.approx(0.05)], [0.5]]
    assert module.mass(torch.tensor([0.5, 1.0])).shape == (2, 1, 2)


def test_eta_is_state_and_may_change():
    module = make_risk(Risk("cvar", 0.3), torch.device("cpu"))
    assert module.state_dict().keys() == {"eta"}
    module.eta.fill_(0.5)
    assert module.levels(torch.tensor([0.5])).item() == 0.25
    given = torch.tensor([0.2])
    RiskDistortion(Risk("cvar", given)).eta.fill_(1.0)
    assert given.item() == pytest.approx(0.2)
    assert make_risk(None, torch.device("cpu")) is None


def test_a_number_out_of_range():
    with pytest.raises(ValueError, match="eta: expected"):
        RiskDistortion(Risk("cvar", 0.0))
