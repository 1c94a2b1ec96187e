"""Off-policy losses as loss modules of TorchRL: updaters, views, state, rows that count, shapes, precision."""

import copy

import pytest
import torch
from loss_parts import CHOICES, LOSSES, close, gradients, make, total
from torchrl.data import Categorical
from torchrl.modules import QValueActor
from torchrl.objectives import (
    HardUpdate,
    LossModule,
    SoftUpdate,
)


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    @pytest.mark.parametrize("kind", ["soft", "hard"])
    def test_updaters_move_the_targets_and_an_optimiser_does_not(self, name, kind):
        loss, td = make(name)
        assert isinstance(loss, LossModule)
        updater = SoftUpdate(loss, tau=0.25) if kind == "soft" else HardUpdate(loss, value_network_update_interval=0)
        targets = [value for key, value in loss.named_buffers() if key.startswith("target_")]
        assert targets and not any("target" in key for key, _ in loss.named_parameters())
        before = [value.clone() for value in targets]
        total(loss(td)).backward()
        torch.optim.SGD(loss.parameters(), 0.1).step()
        assert all(map(torch.equal, targets, before))
        updater.step()
        online, inner = loss.online_and_targets()
        share = 0.25 if kind == "soft" else 1.0
        assert any(not torch.equal(one, old) for one, old in zip(inner, online, strict=True)) == (kind == "soft")
        held = {value.data_ptr() for value in targets}
        assert {value.data_ptr() for value in inner} <= held
        by_address = {value.data_ptr(): old for value, old in zip(targets, before, strict=True)}
        for source, target in zip(online, inner, strict=True):
            old = by_address[target.data_ptr()]
            close(target.detach(), old + share * (source.detach() - old))

    def test_views_are_the_parameters(self, name):
        loss, _ = make(name)
        names = [key.removesuffix("_params") for key, _ in loss.named_children() if key.endswith("_params")]
        assert names
        for key in names:
            source = getattr(loss, f"{key.removeprefix('target_')}_params")
            assert {id(v) for v in source.values(True, True)} & {id(v) for v in loss.parameters()}
            assert not any(v.requires_grad for v in getattr(loss, f"{key}_params").values(True, True))
        loss.double()
        assert all(v.dtype == torch.float64 for v in loss.parameters())
        for key in names:
            view = getattr(loss, f"{key}_params")
            assert all(v.dtype == torch.float64 for v in view.values(True, True) if v.is_floating_point())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_parameters_of_another_dtype(self, name, dtype):
        loss, td = make(name)
        exact, grads = gradients(copy.deepcopy(loss), td.clone())
        loss.to(dtype)
        assert all(v.dtype == dtype for v in loss.parameters())
        cast = td.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
        got, also = gradients(loss, cast)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(value.dtype == wide for key, value in got.items() if key.startswith("loss") and key != "loss_alpha")
        assert cast["td_error"].dtype == wide
        assert all(grad.isfinite().all() for grad in also) and len(also) == len(grads)
        if name != "hybrid":  # which draws other numbers in another dtype
            for key in exact.keys():
                close(got[key].float(), exact[key], rtol=0.05, atol=0.05 if dtype != torch.float64 else 1e-5)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_out_keys_are_what_is_returned_and_can_be_selected(self, name, reduction):
        loss, td = make(name, reduction=reduction)
        assert set(loss.out_keys) == set(loss(td).keys())
        chosen = [key for key in loss.out_keys if key.startswith("loss")]
        given = {(key if isinstance(key, str) else "_".join(key)): td.get(key) for key in loss.in_keys}
        assert len(loss(**given)) == len(loss.out_keys) if len(loss.out_keys) > 1 else loss(**given).shape == (12,)
        loss.select_out_keys(chosen[0])
        assert loss.out_keys == [chosen[0]] == list(loss(td).keys())
        assert isinstance(loss(**given), torch.Tensor)
        loss.reset_out_keys()
        assert set(loss.out_keys) == set(loss(td).keys())

    def test_batches_of_any_number_of_dims(self, name):
        loss, td = make(name)
        expected, _ = gradients(loss, td)
        folded = td.reshape(3, 4)
        got, _ = gradients(loss, folded)
        assert folded["td_error"].shape == (3, 4)
        if name != "hybrid":
            for key in expected.keys():
                close(got[key], expected[key])
        one = td[0]
        assert all(value.isfinite().all() for value in loss(one).values()) and one["td_error"].shape == ()

    def test_state_and_copies(self, name):
        loss, td = make(name)
        other, _ = make(name)
        with torch.no_grad():
            for param in loss.parameters():
                param.add_(0.1)
        loss.update_targets_(0.5)
        other.load_state_dict(loss.state_dict())
        twin = copy.deepcopy(loss)
        (expected, grads), (got, _), (copied, also) = gradients(loss, td), gradients(other, td), gradients(twin, td)
        for key in expected.keys():
            close(got[key], expected[key])
            close(copied[key], expected[key])
        close(also, grads)
        HardUpdate(twin, value_network_update_interval=0).step()
        assert all(map(torch.equal, *twin.online_and_targets()))
        assert not all(map(torch.equal, *loss.online_and_targets()))

    def test_rows_that_do_not_count(self, name):
        """They affect no loss, statistic or gradient, whatever they hold, NaN included."""
        loss, td = make(name, valid_key="valid")
        valid = torch.arange(12) % 3 != 0
        td["valid"] = valid
        td["priority_weight"] = torch.rand(12) + 0.1
        expected, grads = gradients(loss, td[valid])
        for nothing in (0.0, torch.nan):
            other = td.clone()
            other["observation"][~valid] = nothing
            other["next", "observation"][~valid] = nothing
            other["next", "reward"][~valid] = nothing
            got, also = gradients(loss, other)
            if name not in ("ac-iqn", "hybrid"):  # these draw numbers for each row
                for key in expected.keys():
                    close(got[key], expected[key])
                close(also, grads)
            assert all(value.isfinite().all() for value in [*got.values(), *also])
            assert (other["td_error"][~valid] == 0).all()

    def test_no_row_counts(self, name):
        loss, td = make(name, valid_key="valid")
        td["valid"] = torch.zeros(12, 1, dtype=torch.bool)
        out, grads = gradients(loss, td)
        assert all((value == 0).all() for key, value in out.items() if key.startswith("loss"))
        assert all((grad == 0).all() for grad in grads)

    def test_a_final_observation_that_is_missing_is_not_bootstrapped_from(self, name):
        loss, td = make(name)
        td["next", "terminated"].zero_()
        td["next", "done"].zero_()
        td["next", "done"][:4] = True
        ended = td.clone()
        ended["next", "terminated"][:4] = True
        td["next", "observation"][:4] = torch.nan
        expected, grads = gradients(loss, ended)
        got, also = gradients(loss, td)
        if name != "hybrid":
            close([got[key] for key in got.keys()], [expected[key] for key in got.keys()])
            close(also, grads)
        assert all(grad.isfinite().all() for grad in also)
        assert td["next", "observation"][:4].isnan().all()

    @pytest.mark.parametrize(
        ("key", "shape"),
        [
            (("next", "reward"), (12, 2)),
            (("next", "reward"), (1,)),
            (("next", "terminated"), (12, 12)),
            ("priority_weight", (12, 2)),
            ("priority_weight", (1, 12)),
            ("steps_to_next_obs", (12, 3)),
        ],
    )
    def test_shapes_that_would_broadcast(self, name, key, shape):
        loss, td = make(name)
        td.batch_size = []
        value = torch.ones(shape, dtype=torch.bool if "terminated" in key else torch.float32)
        td["next"].batch_size = []
        td[key] = value
        td.batch_size = [12] if shape[0] == 12 else []
        if shape[0] == 12:
            with pytest.raises(ValueError, match=r"expected \[12, 1\].*received .*Remedy"):
                loss(td)
        else:
            with pytest.raises((ValueError, RuntimeError, IndexError)):
                loss(td)

    def test_weights_of_either_shape(self, name):
        loss, td = make(name)
        td["priority_weight"] = torch.rand(12) + 0.1
        expected, _ = gradients(loss, td)
        td["priority_weight"] = td["priority_weight"].unsqueeze(-1)
        got, _ = gradients(loss, td)
        for key in expected.keys():
            close(got[key], expected[key])

    @pytest.mark.parametrize("reduction", ["none", "sum"])
    def test_reductions(self, name, reduction):
        mean, td = make(name)
        loss, _ = make(name, reduction=reduction)
        torch.manual_seed(1)
        expected = mean(td)
        torch.manual_seed(1)
        got = loss(td)
        for key in [key for key in expected.keys() if key.startswith("loss")]:
            value = got[key].mean() if reduction == "none" else got[key] / 12
            assert got[key].shape == ((12,) if reduction == "none" else ())
            close(value, expected[key])

    def test_half_precision(self, name):
        loss, td = make(name)
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(td.clone())
        expected, _ = make(name)
        exact = expected(td)
        for key in [key for key in exact.keys() if key.startswith("loss")]:
            assert out[key].dtype == torch.float32
            close(out[key], exact[key], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["td3", "ac-iqn"])
def test_losses_one_by_one(name):
    """What TorchRL's stepper of TD3 calls: the losses of the forward pass, and nothing is written."""
    loss, td = make(name)
    torch.manual_seed(1)
    both, written = loss(td.clone()), td.clone()
    torch.manual_seed(1)
    critic, rows = loss.value_loss(written)
    actor, _ = loss.actor_loss(written)
    close(critic, both["loss_qvalue"])
    close(actor, both["loss_actor"])
    assert rows["td_error"].shape == (1, 12) and "td_error" not in written
    actor.backward()
    assert all(param.grad is None for key, param in loss.named_parameters() if "qvalue" in key)
    assert all(param.grad.any() for key, param in loss.named_parameters() if "actor" in key)


@pytest.mark.parametrize("name", ["c51", "quantile"])
def test_networks_of_distributions_within_an_actor(name):
    """TorchRL's QValueActor on our network: the losses of the network itself, with targets of its own."""
    plain, td = make(name)
    actor = QValueActor(plain.value_network, in_keys=["observation"], spec=Categorical(CHOICES))
    loss = type(plain)(actor)
    close(loss(td.clone()), plain(td.clone()))
    assert actor(td.clone())["action"].shape == (12,)
    before = [value.clone() for value in loss.target_network.parameters()]
    with torch.no_grad():
        next(actor.parameters()).add_(1.0)
    assert all(map(torch.equal, before, loss.target_network.parameters()))
    SoftUpdate(loss, tau=0.25).step()
    assert not all(map(torch.equal, before, loss.target_network.parameters()))
