"""OptionController: availability, durations, fallback, state, exploration, bad rules, variants."""

import pytest
import torch
from option_parts import (
    OBS,
    TRADING_DURATIONS,
    TRADING_MIN_DURATION,
    TRADING_NAMES,
    Fixed,
    make_controller,
    rows,
    trading_hazard,
)
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import OptionController, OptionSet, TimeHazard
from torchrl_perf.runtime import no_host_sync


def always(prob):
    probs = {}  # by device: made when the controller is, and not in what is audited

    def rule(td):
        if td.device not in probs:
            probs[td.device] = torch.tensor(prob, device=td.device)
        return probs[td.device].expand(*td.shape, -1)

    return rule


def act(controller, td, kind=ExplorationType.RANDOM):
    with set_exploration_type(kind), torch.no_grad():
        return controller(td.copy())


class TestChoice:
    def test_frequencies_are_those_of_the_softmax_over_what_is_available(self, device):
        logits = torch.tensor([1.0, 0.0, 2.0, 0.5])
        allowed = torch.tensor([True, False, True, True])
        controller = make_controller(
            logits.tolist(), device, initiation=lambda td: allowed.to(td.device).expand(*td.shape, -1)
        )
        td = act(controller, rows(40_000, device=device))
        counts = td["active_option"].bincount(minlength=4).cpu()
        expected = torch.softmax(logits.masked_fill(~allowed, -torch.inf), -1) * 40_000
        assert counts[1] == 0
        chi_square = ((counts - expected).square() / expected)[allowed].sum()
        assert chi_square < 13.8  # 2 degrees of freedom, p = .001
        torch.testing.assert_close(
            td["option_log_prob"].cpu(), (expected / 40_000).log()[td["active_option"].cpu()], rtol=1e-4, atol=1e-5
        )

    def test_greedy_where_it_does_not_explore(self):
        td = rows(2, allowed=torch.tensor([[True, True, True], [True, False, True]]))
        controller = make_controller((0.0, 3.0, 1.0), example=td, initiation=lambda td: td["allowed"])
        assert act(controller, td, ExplorationType.DETERMINISTIC)["active_option"].tolist() == [1, 2]

    def test_temperature_sharpens_and_falls_by_the_same_factor(self, device):
        options = {"temperature": 1.0, "temperature_end": 0.1, "temperature_steps": 1000}
        controller = make_controller((0.0, 1.0), device, controller=options)
        controller.step(300)
        assert float(controller.temperature) == pytest.approx(0.1**0.3, rel=1e-5)
        controller.step(torch.tensor(5000, device=device))
        assert float(controller.temperature) == pytest.approx(0.1)
        td = rows(1, device=device)
        log_probs = controller.log_probs(td, controller.available(td)).detach().cpu()
        torch.testing.assert_close(log_probs, torch.tensor([[0.0, 10.0]]).log_softmax(-1))
        other = make_controller((0.0, 1.0), device, controller=options)
        other.load_state_dict(controller.state_dict())
        assert torch.equal(other.temperature, controller.temperature)

    @pytest.mark.parametrize(("fallback", "index"), [(None, 2), ("o1", 1)])
    def test_the_fallback_where_nothing_is_available(self, fallback, index, device):
        nothing = lambda td: torch.zeros(*td.shape, 3, dtype=torch.bool, device=td.device)  # noqa: E731
        controller = make_controller((5.0, torch.nan, 0.0), device, initiation=nothing, fallback=fallback)
        if fallback == "o1":
            controller = make_controller((torch.nan, 1.0, 0.0), device, initiation=nothing, fallback=fallback)
        td = rows(4, device=device)
        log_probs = controller.log_probs(td, controller.available(td))
        log_probs[..., index].sum().backward()
        assert controller.selector.values.grad.tolist() == [0.0, 0.0, 0.0]
        td = act(controller, td)
        assert td["active_option"].tolist() == [index] * 4
        assert td["option_log_prob"].tolist() == [0.0] * 4
        assert td["option_available"].sum(-1).tolist() == [1] * 4

    def test_any_batch_shape_and_each_row_as_it_is_alone(self, device):
        torch.manual_seed(1)
        selector = nn.Linear(OBS, 4).to(device)
        controller = make_controller(
            (0.0,) * 4,
            device,
            selector=selector,
            termination=always([0.0, 1.0, 0.0, 1.0]),
            initiation=lambda td: td["observation"][..., :1] > torch.tensor([-1.0, 0.0, 0.5, 2.0], device=td.device),
            min_duration=(1, 1, 1, 4),
        )
        td = rows(5, 3, device=device)
        td["observation"].normal_()
        td["option"].random_(0, 4)
        td["option_age"].random_(0, 6)
        whole = act(controller, td, ExplorationType.DETERMINISTIC)
        assert whole["option_available"].shape == (5, 3, 4)
        for row in range(5):
            for agent in range(3):
                alone = act(controller, td[row, agent], ExplorationType.DETERMINISTIC)
                for key in ("active_option", "option_start", "option_log_prob", ("next", "option_age")):
                    torch.testing.assert_close(alone[key], whole[key][row, agent], rtol=1e-5, atol=1e-6)


class TestState:
    def test_a_running_option_goes_on(self):
        controller = make_controller((0.0, 9.0, 0.0), termination=always([0.0, 0.0, 0.0]))
        td = act(controller, rows(3, option=2, age=7))
        assert td["active_option"].tolist() == td["next", "option"].tolist() == [2] * 3
        assert td["option_start"].tolist() == [False] * 3
        assert td["next", "option_age"].tolist() == [8] * 3
        assert td["option_log_prob"].tolist() == [0.0] * 3
        assert td["option"].tolist() == [2] * 3  # what came in is left as it is

    @pytest.mark.parametrize("fresh", ["age", "is_init"])
    def test_a_new_episode_has_no_option_yet(self, fresh):
        controller = make_controller((0.0, 30.0, 0.0), termination=always([0.0, 0.0, 0.0]))
        td = rows(2, option=2, age=7)
        if fresh == "age":
            td["option_age"][1] = 0
        else:
            td["is_init"] = torch.tensor([[False], [True]])
        td = act(controller, td)
        assert td["active_option"].tolist() == [2, 1]
        assert td["next", "option_age"].tolist() == [8, 1]
        assert td["option_start"].tolist() == [False, True]

    def test_nothing_ends_before_its_least_duration(self):
        controller = make_controller((0.0, 30.0), termination=always([1.0, 1.0]), min_duration=(3, 1))
        for age, expected in ((1, False), (2, False), (3, True)):
            assert act(controller, rows(1, option=0, age=age))["option_start"].item() is expected
        assert act(controller, rows(1, option=1, age=1))["option_start"].item()

    def test_the_same_option_may_be_chosen_again(self):
        controller = make_controller((0.0, 30.0), termination=always([1.0, 1.0]))
        td = act(controller, rows(1, option=1, age=4))
        assert (td["active_option"].item(), td["option_start"].item(), td["next", "option_age"].item()) == (1, True, 1)

    def test_a_probability_that_is_not_a_number_ends_nothing(self):
        controller = make_controller((0.0, 0.0), termination=always([torch.nan, torch.nan]))
        assert not act(controller, rows(8, option=1, age=4))["option_start"].any()

    def test_next_option_from_the_state_under_next(self):
        controller = make_controller((0.0, 30.0), termination=always([1.0, 0.0]), min_duration=2)
        td = rows(4)
        td["next"] = rows(4)
        td["next", "option"] = torch.tensor([0, 0, 1, 0])
        td["next", "option_age"] = torch.tensor([1, 2, 9, 0])
        controller.write_following(td)
        assert td["next", "active_option"].tolist() == [0, 1, 1, 1]

    def test_durations_in_simulation(self, device):
        """Mean durations of the six trading options; each is forced in turn, 2,000 rows at a time."""
        options = OptionSet(TRADING_NAMES, termination=trading_hazard(), min_duration=TRADING_MIN_DURATION)
        count = 2_000
        means = []
        for index, horizon in enumerate((21, 21, 400, 150, 16, 31)):
            logits = [100.0 if column == index else 0.0 for column in range(6)]
            example = rows(2, device=device)
            controller = OptionController(Fixed(logits, device), options, example=example).to(device)
            td = rows(count, device=device)
            lasting = torch.ones(count, dtype=torch.bool, device=device)
            total = torch.zeros((), device=device)
            for _ in range(horizon):
                acted = act(controller, td)
                lasting &= ~acted["option_start"] | (td["option_age"] == 0)
                total += lasting.sum()
                td["option"], td["option_age"] = acted["next", "option"], acted["next", "option_age"]
            means.append(float(total) / count)
        # standard errors below .05, and .05 * 22 for an option of 50 steps on average
        for mean, expected in zip(means, TRADING_DURATIONS, strict=True):
            assert mean == pytest.approx(expected, rel=0.08)


class TestAgents:
    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    @pytest.mark.parametrize("trailing", [(), (1,)])
    def test_one_that_does_not_exist_has_the_fallback_and_chooses_nothing(self, kind, trailing, device):
        controller = make_controller(
            selector=nn.Linear(OBS, 3).to(device),
            device=device,
            termination=always([1.0, 1.0, 1.0]),
            fallback="o1",
            example=rows(4, device=device, valid=torch.ones(4, *trailing, dtype=torch.bool, device=device)),
            controller={"valid_key": "valid"},
        )
        assert "valid" in controller.in_keys
        valid = torch.tensor([[True, False, True], [False, True, False]], device=device)
        td = rows(2, 3, device=device, option=2, age=5, valid=valid.view(2, 3, *trailing))
        td["observation"].normal_()
        td["observation"][~valid] = torch.nan
        with no_host_sync(device):
            out = act(controller, td, kind)
        assert torch.equal(out["option_start"], valid)
        assert (out["active_option"][~valid] == 1).all()
        assert (out["next", "option"][~valid] == 1).all()
        assert (out["option_log_prob"][~valid] == 0).all()
        assert out["option_log_prob"].isfinite().all()
        assert torch.equal(out["next", "option_age"], valid.long())
        # one that comes to exist has no option yet, and chooses
        td["valid"] = torch.ones_like(td["valid"])
        td["option"], td["option_age"] = out["next", "option"], out["next", "option_age"]
        td["observation"] = torch.zeros_like(td["observation"])
        assert act(controller, td, kind)["option_start"][~valid].all()

    def test_the_option_of_a_next_state_without_the_agent(self):
        example = rows(4, valid=torch.ones(4, dtype=torch.bool))
        options = {"termination": always([0.0, 0.0, 0.0]), "example": example, "controller": {"valid_key": "valid"}}
        controller = make_controller((0.0, 30.0, 0.0), **options)
        td = rows(2)
        td["next"] = rows(2, option=0, age=3, valid=torch.tensor([True, False]))
        assert controller.write_following(td)["next", "active_option"].tolist() == [0, 2]

    def test_the_example_has_the_flag(self):
        with pytest.raises(ValueError, match=r"in_keys: expected keys among .*received \['valid'\].*valid_key"):
            make_controller(controller={"valid_key": "valid"})


class TestHostAndDevice:
    def test_no_host_read(self, device):
        controller = make_controller((0.0,) * 6, device, termination=trading_hazard().to(device))
        td = rows(16, device=device, age=3)
        td["next"] = rows(16, device=device, age=3)
        with no_host_sync(device):
            act(controller, td)
            controller.write_following(td)
            controller.step(3)

    def test_rules_that_are_modules_move_with_the_controller(self):
        controller = make_controller((0.0,) * 6, termination=trading_hazard())
        names = dict(controller.named_buffers())
        assert {"termination.cap", "min_duration", "temperature"} <= set(names)
        assert controller.to(torch.float64).termination.cap.dtype == torch.float64

    def test_variants_agree(self, variant):
        """Drawn apart for each row, and with the eager probabilities; a compiler may draw in another order."""
        count = 4_000
        hazard = trading_hazard().to(variant.device)
        controller = make_controller((0.0, 1.0, 0.5, 0.0, 2.0, -1.0), variant.device, termination=hazard)
        td = rows(count, device=variant.device, option=4, age=9)

        def step():
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                out = controller(td.copy())
            return out["active_option"], out["option_start"], out["next", "option_age"], out["option_log_prob"]

        fn = variant(step)
        for _ in range(4):  # the last one is a replay
            option, start, age, log_prob = (part.clone() for part in fn())
        assert not torch.equal(fn()[1], start)  # fresh numbers in each call
        assert (option[~start] == 4).all()
        assert torch.equal(age, torch.where(start, 1, 10))
        log_probs = controller.log_probs(td, controller.available(td)).detach()
        chosen = log_probs.gather(-1, option.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(log_prob, torch.where(start, chosen, 0.0), rtol=1e-5, atol=1e-5)
        ends, begun = float(controller.termination_prob(td)[0]), int(start.sum())
        assert begun / count == pytest.approx(ends, abs=5 * (ends * (1 - ends) / count) ** 0.5)
        probs = log_probs[0].exp()
        shares = torch.nn.functional.one_hot(option[start], 6).float().mean(0)
        assert ((shares - probs).abs() < 5 * (probs * (1 - probs) / begun).sqrt()).all()


class TestBadInput:
    @pytest.mark.parametrize(
        ("rule", "received"),
        [
            (lambda td: torch.ones(3, dtype=torch.bool), r"torch.bool \[3\]"),
            (lambda td: torch.ones(*td.shape, dtype=torch.bool), r"torch.bool \[2\]"),
            (lambda td: torch.ones(*td.shape, 2, dtype=torch.bool), r"torch.bool \[2, 2\]"),
            (lambda td: torch.ones(*td.shape, 3), r"torch.float32 \[2, 3\]"),
            (lambda td: True, "bool"),
            (lambda td: td["height"] > 0, "KeyError"),
        ],
    )
    def test_initiation(self, rule, received):
        with pytest.raises(ValueError, match=rf"initiation: expected .*bool \[B, O\].*received {received}.*Remedy"):
            make_controller(initiation=rule)

    @pytest.mark.parametrize(
        ("rule", "received"),
        [
            (lambda td: torch.ones(*td.shape), r"torch.float32 \[2\]"),
            (lambda td: torch.ones(*td.shape, 3, dtype=torch.bool), r"torch.bool \[2, 3\]"),
            (lambda td: torch.full((*td.shape, 3), 1.5), "1.5 to 1.5"),
            (lambda td: torch.full((*td.shape, 3), -0.5), "-0.5 to -0.5"),
        ],
    )
    def test_termination(self, rule, received):
        with pytest.raises(ValueError, match=rf"termination: expected .*received {received}.*Remedy"):
            make_controller(termination=rule)

    def test_selector(self):
        with pytest.raises(ValueError, match=r"selector: expected .*received torch.float32 \[2, 4\]"):
            make_controller(selector=nn.Linear(OBS, 4))
        with pytest.raises(ValueError, match=r"selector: expected .*received RuntimeError"):
            make_controller(selector=nn.Linear(OBS + 1, 3))

    def test_keys(self):
        with pytest.raises(ValueError, match=r"in_keys: expected keys among .*observation.*received \['pixels'\]"):
            make_controller(controller={"in_keys": ["pixels"]})

    @pytest.mark.parametrize("temperature", [0.0, -1.0])
    def test_temperature(self, temperature):
        with pytest.raises(ValueError, match="temperature: expected positive"):
            make_controller(controller={"temperature": temperature})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("names", ("a",)),
            ("names", ("a", "a")),
            ("names", "ab"),
            ("fallback", "c"),
            ("min_duration", 0),
            ("min_duration", (1, 2, 3)),
            ("action_range", (0.5,)),
            ("action_range", ((0.5, 0.5), 1.0)),
            ("action_range", (2.0, 1.0)),
        ],
    )
    def test_option_set(self, field, value):
        with pytest.raises(ValueError, match=f"{field}: expected .*received"):
            OptionSet(**({"names": ("a", "b")} | {field: value}))

    def test_time_hazard(self):
        with pytest.raises(ValueError, match="hazard_max: expected more than"):
            TimeHazard(2, hazard_min=3, hazard_max=3, steepness=1)
        with pytest.raises(ValueError, match=r"cap: expected probabilities"):
            TimeHazard(2, hazard_max=3, steepness=1, cap=1.5)
        with pytest.raises(ValueError, match="steepness: expected a number or 2 of them"):
            TimeHazard(2, hazard_max=3, steepness=(1, 1, 1))
