"""DurotaxisTrainer: the loop, components, metrics, curriculum, early stop, best model, resume, modes, refusals."""

import json

import pytest
import torch
from colony_runs import SMALL, make, parameters
from states import assert_graph_equals_compiled, assert_modes_agree, assert_same_state, run

from torchrl_perf.cli import main
from torchrl_perf.envs import CartPole, Durotaxis
from torchrl_perf.envs.durotaxis import ColonyCurriculum
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.durotaxis.blueprint import make_colony
from torchrl_perf.systems.durotaxis.config import DUROTAXIS_PRESETS, DurotaxisConfig
from torchrl_perf.systems.durotaxis.trainer import ENDS
from torchrl_perf.trainers import train
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder

VARIANTS = {
    "global": {},
    "per node": {"actions": "per_node"},
    "total": {"value_heads": "total", "encoder_layers": 2, "clip_value": True},
    "full reward": {"reward_mode": "full", "standardize_components": True, "simplex_groups": 0, "clip_value": True},
    "stages": {"stage_one_frames": 32, "entropy_coeff_final": 0.0, "entropy_frames": 64, "entropy_floor": 1.0},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_iterations_change_both_networks_and_wait_for_nothing(options):
    trainer = run(make(**options), 2)
    before = parameters(trainer)
    with no_host_sync():
        run(trainer, 3)
    after = parameters(trainer)
    still = [key for key, value in before.items() if torch.equal(value, after[key])]
    # the softmax of attention does not see what is added to all keys alike
    assert all(name.endswith("key.bias") for name in still)
    row = trainer.metrics.flush(80)
    assert row["train/first_bad_iteration"] == -1
    assert row["train/kl"] >= 0
    assert sum(row[f"episode/{name}"] for name in ENDS) == pytest.approx(1.0)
    assert 0 < row["episode/progress"] < 2
    assert 1 <= row["colony/nodes"] <= 24
    trainer.close()


@pytest.mark.parametrize("options", [VARIANTS[name] for name in ("per node", "full reward", "stages")])
def test_three_save_two_is_load_two(options, tmp_path):
    trainer = run(make(**options), 3)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make(**{**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    assert resumed.metrics.flush(1) == trainer.metrics.flush(1)


class TestComponents:
    def test_columns_add_up_to_the_reward_and_values_to_its_value(self):
        trainer = run(make(reward_mode="full", clip_value=False), 1)
        batch = trainer.collect()
        names = trainer.component_names
        assert names == Durotaxis.component_names
        torch.testing.assert_close(trainer.columns(batch).sum(-1, keepdim=True), batch["next", "reward"])
        batch = trainer.advantage(batch)
        assert batch["state_value"].shape == batch["value_target"].shape == (4, 4, len(names))
        assert batch["advantage"].shape == (4, 4, 1)
        # by linearity: the advantage of the sum with the sum of the values
        gamma, lmbda = trainer.config.gamma, trainer.config.lmbda
        value, after = batch["state_value"].sum(-1), batch["next", "state_value"].sum(-1)
        reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1).float()
        terminated = batch["next", "terminated"].squeeze(-1).float()
        expected, carried = torch.zeros_like(value), torch.zeros(4)
        for t in reversed(range(4)):
            delta = reward[:, t] + gamma * after[:, t] * (1 - terminated[:, t]) - value[:, t]
            carried = delta + gamma * lmbda * (1 - done[:, t]) * carried
            expected[:, t] = carried
        torch.testing.assert_close(batch["advantage"].squeeze(-1), expected, rtol=1e-4, atol=1e-4)

    def test_only_those_that_count_have_values(self):
        trainer = make()
        assert trainer.component_names == ("centroid", "termination")
        assert trainer.advantage(trainer.collect())["state_value"].shape == (4, 4, 2)

    def test_weights_on_the_device_are_honoured_and_saved(self):
        trainer = make()
        batch = trainer.collect()
        whole = trainer.advantage(batch.copy())
        trainer.component_advantage.weights.copy_(torch.tensor([1.0, 0.0]))
        part = trainer.advantage(batch.copy())
        torch.testing.assert_close(part["advantage"], whole["advantage_components"][..., :1])
        other = make()
        other.load_state_dict(trainer.state_dict())
        assert other.component_advantage.weights.tolist() == [1.0, 0.0]

    def test_weights_of_the_reward_are_those_of_the_env_at_the_time(self):
        trainer = make()
        batch = trainer.collect()
        before = trainer.columns(batch)
        trainer.env.reward_weights.mul_(2.0)
        torch.testing.assert_close(trainer.columns(batch), 2 * before)

    def test_standardised_components_are_of_one_scale(self):
        trainer = make(standardize_components=True, num_envs=16)
        batch = trainer.advantage(trainer.collect())
        parts = batch["advantage_components"].flatten(0, 1)
        expected = ((parts - parts.mean(0)) / parts.std(0, correction=0)).sum(-1, keepdim=True)
        torch.testing.assert_close(batch["advantage"].flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


class TestEarlyStop:
    def test_the_first_update_has_no_divergence_and_is_made(self):
        trainer = run(make(target_kl=1e-6, epochs=4, learning_rate=0.05), 1)
        # of an update that moved, the next one sees a divergence far above: one is made, exactly
        assert trainer.metrics.flush(1)["train/updates_applied"] == 1

    def test_what_is_skipped_changes_nothing(self):
        trainer = run(make(target_kl=1e-6, epochs=1, minibatches=1, learning_rate=0.05), 1)
        once = parameters(trainer)
        more = parameters(run(make(target_kl=1e-6, epochs=6, minibatches=1, learning_rate=0.05), 1))
        for key, value in once.items():
            assert torch.equal(value, more[key]), key

    def test_the_divergence_is_that_of_the_whole_batch(self):
        trainer = make(minibatches=1, epochs=1, target_kl=None)
        batch = trainer.advantage(trainer.collect())
        trainer.update(batch)
        old, new = (batch["params", "action", name] for name in ("loc", "scale")), None
        with torch.no_grad():
            new = trainer.actor.get_dist(batch).dists["action"]
        loc, scale = old
        expected = ((scale / new.scale).square() + ((loc - new.loc) / new.scale).square() - 1) / 2
        expected = (expected - (scale / new.scale).log()).sum(-1).mean()
        found = trainer.loss(batch.reshape(-1))["kl"]
        torch.testing.assert_close(found, expected)
        assert found > 0

    def test_a_large_target_stops_nothing(self):
        assert run(make(target_kl=1e6), 1).metrics.flush(1)["train/updates_applied"] == 4


class TestSchedules:
    def test_the_weight_of_the_entropy(self):
        trainer = make(entropy_coeff=0.25, entropy_coeff_final=0.05, entropy_frames=64)  # 4 iterations
        weights = []
        for _ in range(6):
            trainer.step()
            weights.append(round(float(trainer.loss.entropy_coeff), 6))
        assert weights == [0.25, 0.2, 0.15, 0.1, 0.05, 0.05]

    def test_below_the_floor_the_shortfall_is_a_loss(self):
        low, high = make(entropy_floor=-100.0), make(entropy_floor=100.0, entropy_floor_coeff=2.0)
        rows = low.advantage(low.collect()).reshape(-1)
        plain, raised = low.loss(rows), high.loss
        high.actor.load_state_dict(low.actor.state_dict())
        difference = raised(rows)["loss_entropy"] - plain["loss_entropy"]
        torch.testing.assert_close(difference, 2.0 * (100.0 - plain["entropy"]))

    def test_stages_of_goal_and_nodes(self):
        stages = {"stage_frames": "0, 32, 64", "stage_goals": "0.3, 0.6, 0.9", "stage_nodes": "8, 10, 12"}
        trainer = make(**stages, stage_one_frames=48, num_envs=4, num_steps=4)
        curriculum = trainer.env.curriculum
        assert curriculum.frames == (0, 32, 48, 64)
        assert curriculum.goal == (0.3, 0.6, 0.6, 0.9)
        assert curriculum.critical_nodes == (8, 10, 10, 12)
        assert curriculum.delete_only == (True, True, False, False)
        seen = set()
        for _ in range(10):
            trainer.step()
            seen.add(trainer.metrics.flush(1)["curriculum/stage"])
        assert max(seen) == 3
        assert make().env.curriculum == ColonyCurriculum()
        judged = make_colony(trainer.config, torch.device("cpu"))
        assert (judged.curriculum.goal, judged.curriculum.critical_nodes) == ((0.9,), (12,))

    def test_stage_one_holds_all_but_the_share_to_delete(self):
        trainer = make(stage_one_frames=64, num_envs=4, num_steps=4)
        stages = []
        for _ in range(8):
            trainer.step()
            stages.append(trainer.metrics.flush(1)["curriculum/stage"])
        assert stages[:3] == [0, 0, 0]
        assert stages[-1] == 1
        assert trainer.env.curriculum.delete_only == (True, False)


class TestMetrics:
    def test_outcomes_and_score_by_hand(self):
        trainer = make(num_steps=8)
        counts, progress, returns = dict.fromkeys(ENDS, 0), [], []
        running = torch.zeros(4)
        for _ in range(3):
            batch = trainer.collect()
            trainer.guard.check(trainer.watched(batch))
            trainer.advantage(batch)
            trainer.measure(batch)
            for t in range(8):
                running += batch["next", "reward"][:, t, 0]
                for n in batch["next", "done"][:, t, 0].nonzero().flatten().tolist():
                    counts[ENDS[int(batch["next", "outcome"][n, t, 0]) - 1]] += 1
                    progress.append(float(batch["next", "graph"][n, t, 1]))
                    returns.append(float(running[n]))
                    running[n] = 0.0
        total = len(returns)
        assert 4 < total < 100
        trainer._applied += 1  # no update was made
        row = trainer.metrics.flush(1)
        for name, count in counts.items():
            assert row[f"episode/{name}"] == pytest.approx(count / total)
        assert row["episode/progress"] == pytest.approx(sum(progress) / total)
        assert row["component/centroid"] + row["component/termination"] == pytest.approx(sum(returns) / total, rel=1e-4)
        score = 1000 * counts["success"] / total + 100 * sum(progress) / total + sum(returns) / total
        assert row["episode/score"] == pytest.approx(score, rel=1e-4)

    def test_the_best_checkpoint_has_the_highest_score(self, tmp_path):
        trainer = make(logger="csv", log_interval=1, checkpoint_interval=1, keep_checkpoints=20, run_dir=str(tmp_path))
        result = train(trainer, progress=False)
        assert trainer.config.best_metric == "episode/score"
        table = (result.run_dir / "progress.csv").read_text(encoding="utf-8").splitlines()
        column = table[0].split(",").index("episode/score")
        scores = [float(line.split(",")[column] or "-inf") for line in table[1:]]
        folder = CheckpointFolder(result.run_dir / "checkpoints")
        best = torch.load(folder.path / "best.pt", weights_only=True)
        assert best["notes"]["best"]["value"] == pytest.approx(max(scores))
        assert best["counters"]["iterations_done"] == scores.index(max(scores)) + 1


class TestPerNode:
    def test_each_node_has_a_choice_and_the_others_none(self):
        trainer = run(make(actions="per_node"), 1)
        batch = trainer.collect()
        mask, kind = batch["node_mask"], batch["action", "kind"]
        assert kind.shape == mask.shape
        assert not kind[~mask].any()
        assert 0 < kind[mask].float().mean() < 1
        assert not batch["action", "kind_log_prob"][~mask].any()
        assert (batch["action", "kind_log_prob"][mask] < 0).all()
        logits = batch["params", "action", "kind", "logits"]
        assert logits.shape == (*mask.shape, 2)

    def test_the_joint_ratio_has_all_nodes(self):
        trainer = make(actions="per_node")
        rows = trainer.advantage(trainer.collect()).reshape(-1)
        losses = trainer.loss(rows)
        assert abs(float(losses["kl_approx"])) < 1e-5
        assert abs(float(losses["kl"])) < 1e-5
        dist = trainer.actor.get_dist(rows)
        joint = sum(part.reshape(len(rows), -1).sum(-1) for part in dist.part_log_probs(rows).values())
        torch.testing.assert_close(rows["action_log_prob"], joint)


def test_own_env_and_networks():
    env = Durotaxis(4, critical_nodes=12, size=(60.0, 60.0), reward_weights={"survival": 2.0, "centroid": 1.0})
    first = make({"env": env})
    assert first.component_names == ("survival", "centroid")
    second = make({"env": env, "actor": first.actor, "critic": first.critic})
    assert second.actor is first.actor
    run(second, 2)


@pytest.mark.parametrize("actions", ["global", "per_node"])
@pytest.mark.slow
def test_compiled_iterations_equal_eager(traced, actions):
    # two steps: each of a rollout is traced for itself
    options = {"actions": actions, "epochs": 1, "minibatches": 1, "target_kl": None, "num_steps": 2}
    assert_modes_agree(lambda mode: make(mode=mode, **options), parameters, 2, atol=1e-4)


@pytest.mark.gpu
class TestGraph:
    @variants
    def test_a_graph_equals_compiled(self, options, fresh_dynamo):
        on_gpu = {"device": "cuda", "total_steps": 640, "target_kl": None, **options}
        assert_graph_equals_compiled(lambda mode: make(mode=mode, **on_gpu), parameters, 8).close()

    @variants
    def test_replays_wait_for_nothing_and_resume_bitwise(self, options, fresh_dynamo, tmp_path):
        trainer = run(make(mode="graph", device="cuda", total_steps=640, **options), 4)
        path = trainer.save(tmp_path / "checkpoint.pt")
        with no_host_sync("cuda", trace=False):
            run(trainer, 3)
        expected = parameters(trainer)
        trainer.load(path)
        for key, value in parameters(run(trainer, 3)).items():
            assert torch.equal(value, expected[key]), key
        trainer.close()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_sixteen_bits(kind):
    trainer = run(make(precision=kind), 3)
    assert trainer.metrics.flush(1)["train/first_bad_iteration"] == -1
    assert all(value.isfinite().all() and value.dtype == torch.float32 for value in parameters(trainer).values())


def test_a_run_from_the_command_line_resumes(tmp_path, capsys):
    given = {**SMALL, "logger": "csv", "log_interval": 1, "run_dir": str(tmp_path)}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if key != "total_steps"]
    assert main(["train", "durotaxis", *arguments, "--no-progress", "--total-steps=80"]) == 0
    (run_dir,) = tmp_path.iterdir()
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["critical_nodes"] == 12
    assert main(["train", "durotaxis", "--resume", str(run_dir), "--total-steps", "112", "--no-progress"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("112 steps in ")


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"encoder_heads": 3}, "encoder_heads: expected a divisor of encoder_width = 8, received 3"),
            ({"simplex_groups": 3}, "simplex_groups: expected a divisor of encoder_width = 8, received 3"),
            ({"delete_max": 1.5}, r"delete_max: expected a number in \(0, 1\], received 1.5"),
            ({"width": 0.0}, "width: expected a positive number, received 0.0"),
            (
                {"value_heads": "total", "standardize_components": True},
                "standardize_components: expected False with value_heads='total'",
            ),
            ({"stage_frames": "0, 9, 5"}, "stage_frames: frames: expected numbers that rise from 0"),
            ({"stage_frames": "0, 9", "stage_goals": "0.9, 0.5"}, "stage_frames: goal: expected stages that do not go"),
            ({"stage_frames": "0, 9", "stage_goals": "0.3, 0.5, 0.9"}, "stage_frames: expected one of stage_goals"),
            ({"stage_goals": "far"}, "stage_goals: expected numbers of at least 0 with commas"),
            ({"stage_nodes": "13"}, "stage_frames: expected stage_nodes of at most critical_nodes = 12"),
            ({"actions": "per_node", "stage_one_frames": 9}, "stage_one_frames: expected 0 with actions='per_node'"),
            ({"loss": "torchrl"}, "loss: expected one of"),
            ({"env": "CartPole"}, "env: expected one of"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            DurotaxisConfig(**{**SMALL, **options})

    def test_what_the_env_refuses(self):
        with pytest.raises(ValueError, match="critical_nodes: expected at least start_nodes"):
            make(critical_nodes=3)

    def test_another_env(self):
        with pytest.raises(ValueError, match=r"env: expected a Durotaxis, .*received CartPole without"):
            make({"env": CartPole(4, device="cpu")})


def test_presets():
    assert set(DUROTAXIS_PRESETS) == {"Durotaxis"}
    assert all(preset.env == name for name, preset in DUROTAXIS_PRESETS.items())
