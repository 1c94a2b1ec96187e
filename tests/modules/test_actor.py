"""DeviceActor writes what ProbabilisticActor writes, bit for bit, in every mode."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, set_skip_existing
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor

from torchrl_perf.modules import BoundedNormal, DeviceActor, DeviceMaskedCategorical, GumbelCategorical
from torchrl_perf.runtime import no_host_sync

CASES = {
    "discrete": (lambda: nn.Linear(4, 3), ["logits"], GumbelCategorical),
    "continuous": (lambda: nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()), ["loc", "scale"], IndependentNormal),
}


def pair(case):
    make, keys, distribution = CASES[case]
    network = make()
    theirs = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )
    return DeviceActor(network, distribution_class=distribution, param_keys=keys), theirs


def call(actor, td, mode):
    torch.manual_seed(3)
    with torch.no_grad(), set_exploration_type(mode):
        return actor(td.copy())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("shape", [[5], [2, 3]])
def test_equals_probabilistic_actor(case, mode, shape):
    ours, theirs = pair(case)
    td = TensorDict({"observation": torch.randn(*shape, 4)}, shape)
    got, wanted = call(ours, td, mode), call(theirs, td, mode)
    assert set(got.keys()) == set(wanted.keys())
    for key in wanted.keys():
        assert torch.equal(got[key], wanted[key]), key
    assert got["action_log_prob"].shape == torch.Size(shape)
    assert ours.in_keys == theirs.in_keys
    assert ours.out_keys == theirs.out_keys


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None])
def test_distribution_and_state_dict_are_the_parents(case, mode):
    ours, theirs = pair(case)
    td = TensorDict({"observation": torch.randn(6, 4)}, [6])
    action = call(ours, td, ExplorationType.RANDOM)["action"]
    batches, dists = [td.copy(), td.copy()], []
    for actor, batch in zip((ours, theirs), batches, strict=True):
        with set_exploration_type(mode):
            dists.append(actor.get_dist(batch))
    assert torch.equal(*[dist.log_prob(action) for dist in dists])
    assert type(dists[0]) is type(dists[1])
    assert set(batches[0].keys()) == set(batches[1].keys()) > {"observation"}
    assert all(torch.equal(batches[0][key], value) for key, value in batches[1].items())
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("case", CASES)
def test_entries_that_are_there_are_kept_where_the_caller_says_so(case):
    ours, theirs = pair(case)
    td = call(theirs, TensorDict({"observation": torch.randn(6, 4)}, [6]), ExplorationType.RANDOM)
    td["observation"] = torch.zeros(6, 4)  # other parameters, if they were computed again
    with set_skip_existing(True):
        got, wanted = call(ours, td, ExplorationType.RANDOM), call(theirs, td, ExplorationType.RANDOM)
        with set_exploration_type(ExplorationType.RANDOM):
            dists = [actor.get_dist(td.copy()) for actor in (ours, theirs)]
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    assert torch.equal(*[dist.log_prob(td["action"]) for dist in dists])


@pytest.mark.parametrize("case", CASES)
def test_sampling_reads_nothing_and_leaves_the_output_dict_to_the_parent(case):
    ours, _ = pair(case)
    td = TensorDict({"observation": torch.randn(6, 4)}, [6])
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        with no_host_sync():
            ours(td.copy())
        out = TensorDict({}, [6])
        assert ours(td.copy(), tensordict_out=out) is out
    assert "action" in out.keys()


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("trailing", [(), (1,)])
def test_agents_that_do_not_exist_act_neutrally(mode, trailing, device):
    valid = torch.tensor([[True, False, True], [False, True, True]])
    td = TensorDict({"observation": torch.randn(2, 3, 4), "exists": valid.view(2, 3, *trailing)}, [2, 3]).to(device)
    td["observation"][~td["exists"].view(2, 3)] = torch.nan
    continuous = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()).to(device)
    for network, keys, kind, neutral in (
        (continuous, ["loc", "scale"], BoundedNormal, 0.0),
        (nn.Linear(4, 3).to(device), ["logits"], DeviceMaskedCategorical, 0),
    ):
        actor = DeviceActor(network, distribution_class=kind, param_keys=keys, valid_key="exists")
        assert set(actor.in_keys) == {"observation", "exists"}
        assert "exists" not in actor.out_keys
        with no_host_sync(device):
            out = call(actor, td, mode)
        missing = ~td["exists"].view(2, 3)
        assert (out["action"][missing] == neutral).all()
        assert (out["action_log_prob"][missing] == 0).all()
        assert out["action_log_prob"].isfinite().all() and (out["action_log_prob"][~missing] != 0).all()
        torch.testing.assert_close(actor.get_dist(td).log_prob(out["action"]), out["action_log_prob"])
        alone = DeviceActor(network, distribution_class=kind, param_keys=keys)
        row = call(alone, td[1, 1], ExplorationType.DETERMINISTIC)
        fixed = call(actor, td, ExplorationType.DETERMINISTIC)
        torch.testing.assert_close(row["action"], fixed["action"][1, 1])
