"""System 000: the original's patterns agree with the package and with known numbers; experiments give their claims."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from studies import claims
from studies.active_dynamics import agent as latent_agent
from studies.active_dynamics import claims as latent_claims
from studies.active_dynamics import loops as latent_loops
from studies.active_dynamics import loss as loss_claims
from studies.originals import latent_loss, rollout_window, transfers
from studies.originals.latent_agent import LoopTraining, PointLoop, encoded_again
from studies.sitting import CONFIRMED, NOT_HERE, NOT_REPRODUCED, PARTLY, REFUSED, Sitting
from torchrl_perf.envs import LatentField
from torchrl_perf.functional.losses.elbo import decayed_weights
from torchrl_perf.systems.active_dynamics import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.trainer import ActiveDynamicsTrainer

CPU = torch.device("cpu")
CLAIMS = {
    "transfers": {latent_claims.FASTER, latent_claims.BESIDE_WORK, latent_claims.PEAK},
    "copy": {
        "rollout copies are 30-50% faster",
        "30-50% less memory of rollout copies",
        "a copy into what is kept saves it",
    },
    "window": {
        "rollout operations are faster",
        "the package's ring is faster than the roll",
        "pooling removes 80-90% of the allocations",
        "the package's ring allocates 80-90% less",
    },
    "kl": {
        "the weights alone are 60-80% faster",
        "KL computation is 60-80% faster",
        "the package's loss is as fast or faster",
        "all starts at once are 60-80% faster than one after the other",
        "kept weights are those that are asked for",
    },
    "masking": {
        "40-60% less memory for masks",
        "faster temporal masking",
        "a mask in a buffer does as well as a new one",
    },
    "variance": {"a cached variance is faster", "training convergence is unchanged by the cache"},
    "cleanup": {
        "the cached check is 10-15% faster",
        "cleanup as a whole is 10-15% faster",
        "what the check costs is what a cleanup costs",
    },
    "belief": {"state updates are 50-70% faster", "a carried hidden state is 50-70% faster"},
    "agent-step": {"agent steps are 50-70% faster", "the package's steps are 50-70% faster, with the correction"},
    "drift": {"state tracking is as good without the encoder"},
    "memory": {"total memory is 0.6-0.8x"},
    "end-to-end": {
        "training convergence is unchanged",
        "training loops are 25-40% faster",
        "the package's loop is 25-40% faster",
    },
    "utilisation": {"better GPU utilisation", "the package uses more of the GPU"},
}


def sitting():
    return Sitting("active_dynamics", CPU, quick=True)


def small(**changes):
    return replace(latent_loops.settings_of(sitting(), 0), **changes)


class TestExperiments:
    """A quick sitting of each."""

    def test_there_is_one_for_each_row_of_the_table(self):
        assert list(claims.experiments("active_dynamics")) == list(CLAIMS)

    @pytest.mark.parametrize("name", CLAIMS)
    def test_outputs_are_equal_and_every_claim_has_a_verdict(self, name, capsys):
        made = sitting()
        claims.run(made, {name: claims.experiments("active_dynamics")[name]})
        assert not [row for row in made.rows if row.get("ok") is False]
        assert {row["claim"] for row in made.verdicts} == CLAIMS[name]
        assert {row["experiment"] for row in made.rows} <= {name}
        assert {row["verdict"] for row in made.verdicts} <= {CONFIRMED, PARTLY, NOT_REPRODUCED, NOT_HERE}
        assert all(row["us"] > 0 for row in made.rows if "us" in row)
        capsys.readouterr()

    def test_utilisation_is_of_the_loops_on_a_gpu(self, monkeypatch, capsys):
        shares = iter((0.2, 0.21, 0.8, 0.9))
        monkeypatch.setattr(latent_loops, "busy_share", lambda call, sitting: (call(), next(shares))[1])
        made = OnCuda("active_dynamics", CPU, quick=True)
        claims.run(made, {"utilisation": latent_loops.utilisation})
        assert [row["utilisation"] for row in made.rows] == pytest.approx([20, 21, 80, 90])
        assert [row["verdict"] for row in made.verdicts] == [PARTLY, CONFIRMED]
        assert "20% -> 21%" in made.verdicts[0]["measured"]
        capsys.readouterr()

    def test_weights_of_another_decay_are_refused(self, monkeypatch, capsys):
        monkeypatch.setattr(
            loss_claims, "decayed_weights", lambda ahead, decay, device: decayed_weights(ahead, 0.9 * decay)
        )
        made = sitting()
        loss_claims._weights(made)
        bad = {row["variant"] for row in made.rows if row.get("ok") is False}
        assert bad == {loss_claims.KEYED, loss_claims.BUFFER}
        assert {row["verdict"] for row in made.verdicts} == {REFUSED}
        capsys.readouterr()

    def test_facts_that_do_not_depend_on_the_machine(self, capsys):
        made = sitting()
        latent_claims.window(made)
        loss_claims.masking(made)
        loss_claims.variance(made)
        words = {row["claim"]: (row["measured"], row["verdict"]) for row in made.verdicts}
        measured, word = words["pooling removes 80-90% of the allocations"]
        assert measured.startswith("0% as written, 50% as described") and word == NOT_REPRODUCED
        measured, word = words["40-60% less memory for masks"]
        assert measured == "33% less; one tensor 67%, in place 100%" and word == PARTLY  # 12, 8, 4 and 0 bytes a step
        assert words["a mask in a buffer does as well as a new one"][1] == NOT_REPRODUCED
        assert words["training convergence is unchanged by the cache"][1] == NOT_REPRODUCED
        capsys.readouterr()


class OnCuda(Sitting):
    """A sitting that takes the paths of CUDA on a CPU: what is captured runs as it is."""

    cuda = property(lambda self: True)


class TestPathsOfCuda:
    """What only a GPU runs, as far as a CPU can."""

    def test_transfers(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        names = latent_claims.transfer.COPIES["to device"]
        calls = {"to device": {name: (lambda: None, None) for name in names}}
        monkeypatch.setattr(latent_claims.transfer, "copy_calls", lambda numel, device: calls)
        monkeypatch.setattr(latent_claims.transfer, "overlap", lambda bench, fn, after, alone, first: 0.25)
        monkeypatch.setattr(latent_claims.transfer, "peak_memory", lambda device, later: 100)
        made = OnCuda("000", CPU, quick=True)
        latent_claims.transfers(made)
        assert not [row for row in made.rows if row.get("ok") is False]
        words = {row["claim"]: row for row in made.verdicts}
        assert set(words) == CLAIMS["transfers"]
        assert words[latent_claims.BESIDE_WORK]["verdict"] == PARTLY  # 25%
        assert words[latent_claims.PEAK]["measured"] == "0% less"
        assert words[latent_claims.PEAK]["verdict"] == NOT_REPRODUCED
        assert "page-locked, non_blocking" in words[latent_claims.FASTER]["measured"]
        capsys.readouterr()

    @pytest.mark.parametrize("name", ["window", "kl", "masking", "cleanup", "belief", "agent-step"])
    def test_graphs_are_variants(self, name, capsys):
        made = OnCuda("000", CPU, quick=True)
        claims.run(made, {name: claims.experiments("active_dynamics")[name]})
        assert not [row for row in made.rows if row.get("ok") is False]
        assert {row["claim"] for row in made.verdicts} == CLAIMS[name]
        assert NOT_HERE not in {row["verdict"] for row in made.verdicts}
        if name not in ("masking", "cleanup"):
            assert any("in a graph" in row["variant"] for row in made.rows)
        capsys.readouterr()


class TestTransfers:
    """The way to the device, and the cleanup."""

    def test_non_blocking_is_asked_for_on_cuda_alone(self):
        class Value:
            def to(self, *args, **options):
                return args or options

        batch, cuda = {"x": Value()}, torch.device("cuda")
        assert transfers.to_device(batch, cuda)["x"] == (cuda,)
        assert transfers.to_device_later(batch, cuda)["x"] == {"device": cuda, "non_blocking": True}
        assert transfers.to_device_later(batch, CPU)["x"] == {"device": CPU}

    def test_the_cache_is_emptied_before_and_after(self, monkeypatch):
        emptied = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
        for flag in (False, True):
            assert transfers.Cleanup(torch.device("cuda"), flag=flag)() is True
            assert transfers.Cleanup(CPU, flag=flag)() is False
        assert len(emptied) == 2
        transfers.Cleanup(torch.device("cuda"), flag=True, empties=False)()
        assert len(emptied) == 2


class TestWindow:
    """Windows and copies."""

    def test_all_forms_hold_the_last_twenty_steps(self):
        for name, form in latent_claims.forms(3, CPU).items():
            observation, action = latent_claims.contents(form, 3, CPU)
            want = torch.stack([latent_claims.numbered(step, 3, CPU)["observation"] for step in range(25, 45)], 1)
            assert torch.equal(observation, want), name
            assert torch.equal(action, -want[..., :2]), name

    def test_before_it_is_full_only_what_there_has_been(self):
        window = rollout_window.RollWindow(4, {"x": torch.zeros(1, 1)})
        for step in (1.0, 2.0, 3.0):
            window.add({"x": torch.full((1, 1), step)})
        assert window.recent()["x"].flatten().tolist() == [1.0, 2.0, 3.0]
        assert window.data["x"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert window.pool == {}  # never filled

    @pytest.mark.parametrize("copy", [rollout_window.copy_always, rollout_window.copy_by_need])
    def test_a_copy_is_one_and_asks_for_no_gradient(self, copy):
        data = {"a": torch.ones(3, requires_grad=True), "b": torch.ones(3)}
        copied = copy(data)
        assert all(torch.equal(copied[name], data[name]) for name in data)
        assert not any(value.requires_grad for value in copied.values())
        assert all(copied[name].data_ptr() != data[name].data_ptr() for name in data)

    def test_allocations_are_counted(self):
        out = torch.zeros(10)
        assert latent_claims.allocations(lambda: torch.ones(10).clone(), 5, CPU) == (10, 400)
        assert latent_claims.allocations(lambda: out.copy_(out), 5, CPU) == (0, 0)


class TestLoss:
    """Weights, masks, variance, divergences."""

    def test_weights(self):
        want = torch.tensor([1.0, 0.8, 0.64, 0.512, 0.4096])
        kept = latent_loss.CachedPowers()
        torch.testing.assert_close(latent_loss.powers(0.8, 5, CPU), want)
        torch.testing.assert_close(kept(0.8, 5, CPU), want)
        assert (want / want.sum()).tolist() == pytest.approx([0.2975, 0.2380, 0.1904, 0.1523, 0.1218], abs=5e-5)
        assert kept(0.5, 3, CPU).shape == (5,)  # stale
        assert latent_loss.powers(0.5, 3, CPU).tolist() == [1.0, 0.5, 0.25]

    @pytest.mark.parametrize("options", [{}, {"cached": True}, {"by_start": True}, {"steps_ahead": 2, "decay": 0.5}])
    def test_the_loss_is_the_package_s(self, options):
        model, td = loss_claims.make_model(CPU), loss_claims.windows(3, CPU)
        ours = MultiStepELBOLoss(model, horizon=options.get("steps_ahead", 5), decay=options.get("decay", 0.8))
        torch.manual_seed(3)
        recon, kl = latent_loss.LoopLoss(model, **options)(td["observation"], td["action"])
        torch.manual_seed(3)
        want = ours(td)
        torch.testing.assert_close(recon, want["loss_recon"])
        torch.testing.assert_close(kl, want["loss_kl"])

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    def test_a_masked_step_is_predicted(self, rate):
        model, td = loss_claims.make_model(CPU), loss_claims.windows(3, CPU)
        latent, action = torch.randn(5, 3, 20, 2), td["action"]
        found = latent_loss.LoopLoss(model, mask_rate=rate, cached=rate == 1.0)._mixed(latent, action)
        first = td["is_init"].squeeze(-1)
        torch.testing.assert_close(found, MultiStepELBOLoss(model, mask_rate=rate)._mixed(latent, action, first))
        if rate:
            torch.testing.assert_close(found[:, :, 2], model.dynamics(found[:, :, 1], action[:, 1]))

    def test_masks(self):
        buffer = latent_loss.MaskBuffer(10_000, CPU)
        first = buffer(10_000, 0.2, CPU)
        assert first is buffer(10_000, 0.2, CPU)
        for mask in (first, latent_loss.mask_anew(10_000, 0.2, CPU)):
            assert mask.shape == (10_000, 1) and ((mask == 0) | (mask == 1)).all()
            assert mask.mean().item() == pytest.approx(0.8, abs=5 * math.sqrt(0.16 / 10_000))

    def test_a_kept_variance_is_that_before_the_update(self):
        step, right = 0.1 * 0.5, math.log(2) + 1e-5  # softplus'(0) = 1/2
        kept, computed = (latent_loss.CachedVariance(1, cached=cached, device=CPU) for cached in (True, False))
        assert kept().item() == pytest.approx(right)
        assert loss_claims._after_update(computed) == (0.0, True)
        off, again = loss_claims._after_update(kept)
        assert off == pytest.approx(math.log(2) - math.log1p(math.exp(-step)), rel=1e-4)
        assert not again


class TestAgent:
    """The point, the belief, the loop."""

    def test_a_point_moves_and_is_seen_as_in_the_env(self):
        env = LatentField(1, process_noise=0.0, action_max=0.5)
        loop = PointLoop(env)
        for _ in range(20):
            loop.reset()
            point, action = torch.tensor(loop.point, dtype=torch.float32), torch.randn(2)
            torch.testing.assert_close(torch.from_numpy(loop.mean()).float(), env.observation_map(point))
            loop.step(action.numpy())
            torch.testing.assert_close(torch.tensor(loop.point).float(), env.predict(point, action))
        loop.point = np.array([1.0, 0.0])  # on the cycle: the velocity is (0, 1), pushed by (0.5, 0)
        loop.step(np.array([2.0, 0.0]))
        assert loop.point.tolist() == pytest.approx([1.05, 0.1])

    def test_noise_has_its_deviation(self):
        loop = PointLoop(LatentField(1, process_noise=0.04))
        moved = []
        for _ in range(2_000):
            loop.point = np.array([1.0, 0.0])
            loop.step(np.zeros(2))
            moved.append(loop.point)
        found = (np.array(moved) - [1.0, 0.1]).std()
        assert found == pytest.approx(math.sqrt(0.04 * 0.1), abs=3 * math.sqrt(0.004 / 8_000))

    def test_one_cell_is_the_window_again_and_the_prediction_is_not(self):
        model = loss_claims.make_model(CPU)
        data = latent_agent.episode(model, 4, CPU)
        found = {name: call() for name, call in latent_agent.belief_calls(model, data).items()}
        again, cell, dropped = (found[name] for name in (latent_agent.AGAIN, latent_agent.CELL, latent_agent.DROPPED))
        assert (again - cell).abs().max() < 1e-5
        assert (again - dropped).abs().max() > 1e-3
        assert not again.requires_grad

    def test_both_loops_begin_with_the_same_model(self):
        config = small(seed=3)
        mine, theirs = LoopTraining(config, CPU, optimised=False).model, ActiveDynamicsTrainer(config).model
        pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    @pytest.mark.parametrize("optimised", [False, True])
    def test_an_iteration_of_the_original_s_loop(self, optimised):
        config = small()
        loop = LoopTraining(config, CPU, optimised=optimised)
        before = [parameter.clone() for parameter in loop.model.parameters()]
        loop.iteration()
        loop.iteration()
        assert len(loop.losses) == loop.updates == 2 * config.updates
        assert all(math.isfinite(value) for value in loop.losses)
        assert not any(torch.equal(one, other) for one, other in zip(before, loop.model.parameters(), strict=True))
        assert loop.reward.information.sum() > 0
        agent = loop.agents[0]
        assert len(agent.seen) == 2 * config.num_steps and not agent.plan["is_init"].any()
        assert torch.stack([action.abs().max() for _, action in agent.seen]).max() <= config.action_max
        seen, last = agent.window.recent(), agent.belief.clone()
        assert torch.equal(seen["previous"][0, 1:], torch.cat([action for _, action in agent.seen[-10:-1]]))
        assert torch.equal(seen["observation"][0], torch.cat([observation for observation, _ in agent.seen[-10:]]))
        found = loop.act(agent)
        with torch.no_grad():
            predicted = loop.model.dynamics(last, agent.seen[-2][1])
            again = encoded_again(loop.model, agent.window.recent())
        torch.testing.assert_close(found, predicted if optimised else again)

    def test_a_bound_is_the_same_for_the_same_model(self):
        config = small()
        model = loss_claims.make_model(CPU)
        state = torch.get_rng_state()
        first, second = (latent_loops.lower_bound(model, config, CPU) for _ in range(2))
        assert first == second and -100 < first < -10
        assert torch.equal(state, torch.get_rng_state())
