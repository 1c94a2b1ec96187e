"""The six navigation agents: host waits, resume, modes, what is stored and counted, faults, memory, bad settings."""

import warnings

import pytest
import torch
from marine_runs import AGENTS, KINDS, OWN, PRESETS, TRAINERS, make, parameters, settings
from states import assert_graph_equals_compiled, assert_modes_agree, assert_same_state, run

from torchrl_perf.envs import AgentStreams, Curriculum, MarineNavigation
from torchrl_perf.modules.noise import OUNoise
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.oom import OutOfMemoryWarning
from torchrl_perf.systems.marine.trainer import make_marine_env
from torchrl_perf.trainers.run.memory_estimate import PeakBytes

agents = pytest.mark.parametrize("agent", AGENTS)


@agents
def test_both_halves_wait_for_nothing_and_all_networks_learn(agent):
    trainer = run(make(agent), 1)
    with no_host_sync():
        run(trainer, 1)  # random actions, no update
    run(trainer, 2)
    before = parameters(trainer)
    with no_host_sync():
        run(trainer, 2)
    after = parameters(trainer)
    # what no object in sight has a gradient of is the objects' part alone
    assert not [key for key, value in before.items() if torch.equal(value, after[key]) and "each" not in key]
    row = trainer.metrics.flush(72)
    assert row["train/first_bad_iteration"] == -1
    assert all(abs(row[f"train/{key}"]) < float("inf") for key in trainer.statistics)
    trainer.close()


@agents
def test_four_save_two_is_load_two(agent, tmp_path):
    trainer = run(make(agent), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    # frames of the curriculum are part of it
    assert int(trainer.env.base_env.frames) == 6 * 12
    resumed = run(make(agent, seed=9), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    trainer.load(path)
    assert_same_state(expected, run(trainer, 2).state_dict())


@pytest.mark.parametrize(
    "agent", [pytest.param(agent, marks=[pytest.mark.slow if agent == "dqn" else pytest.mark.long]) for agent in AGENTS]
)
def test_compiled_iterations_equal_eager(backend, agent):
    options = {"updates_per_iteration": 1, "num_steps": 1, "learning_starts": 9}
    assert_modes_agree(lambda mode: make(agent, **options, mode=mode), parameters, 4)


@pytest.mark.gpu
@agents
def test_a_graph_equals_compiled_and_resumes_bitwise(agent, fresh_dynamo, tmp_path):
    trainer = assert_graph_equals_compiled(lambda mode: make(agent, mode=mode, device="cuda"), parameters, 10)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = parameters(run(trainer, 2))
    trainer.load(path)
    for key, value in parameters(run(trainer, 2)).items():
        assert torch.equal(value, expected[key]), key
    trainer.close()


# the others store by the same code: what the two add to it is n steps, and a buffer that keeps each observation once
@pytest.mark.parametrize(
    "agent", [pytest.param(agent, marks=[] if agent in {"iqn", "sac"} else pytest.mark.slow) for agent in AGENTS]
)
def test_terminals_in_the_buffer_are_the_events(agent):
    """Goals so near that they are reached by chance, and vessels that collide."""
    crowd = {"stage_frames": "0", "stage_robots": "2", "stage_obstacles": "1", "stage_distance": "0"}
    trainer = make(agent, **crowd, max_episode_steps=40, capacity=4_000, total_steps=2_400, updates_per_iteration=1)
    base = trainer.env.base_env
    events, ends, steps, measure = [], [], [], trainer.measure

    def watch(batch):
        events.append((batch["next", "event"] > 0).sum())
        ends.append((batch["valid"] & batch["next", "done"]).sum())
        steps.append(batch["valid"].sum())
        measure(batch)

    trainer.measure = watch
    for iteration in range(40):
        if iteration % 4 == 0:  # goals where the vessels are going
            base.state_goal.copy_(base.state_position + torch.tensor([2.5, 0.0]))
        run(trainer, 1)
    events, ends, steps = (int(sum(parts)) for parts in (events, ends, steps))
    stored = trainer.buffer.storage
    terminated, valid = stored.field(("next", "terminated")), stored.field("valid")
    assert int(terminated.sum()) == int((terminated & valid).sum()) == events >= 8
    assert int(valid.sum()) == steps < valid.numel()
    assert int(trainer.episodes.count) == ends >= events
    row = trainer.metrics.flush(480)
    shares = [row[f"navigation/{name}"] for name in ("success", "collision", "timeout")]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] + shares[1] == pytest.approx(events / ends)
    assert row["navigation/active"] == pytest.approx(steps / 960)


@agents
def test_only_what_is_learnt_from_is_stored(agent):
    trainer = run(make(agent), 3)
    sample = trainer.buffer.sample(64)
    assert sample["valid"].all()
    found = {str(key) for key in sample.keys(True, True)}
    assert not [key for key in found if "event" in key or "colregs" in key or "collector" in key or "is_init" in key]


def test_the_curriculum_goes_on_by_frames_and_allocates_nothing():
    trainer = make("dqn", stage_frames="0, 48", max_episode_steps=4)
    base, places = trainer.env.base_env, []
    for iteration in range(8):
        run(trainer, 1)
        places.append([buffer.data_ptr() for buffer in base.buffers()])
        row = trainer.metrics.flush(iteration)
        # a batch has 12 frames; the worlds of the second stage begin with the first reset in it
        assert row["navigation/stage"] == (iteration >= 3)
        assert row["navigation/active"] <= (0.5 if iteration < 4 else 1.0)
    assert all(place == places[0] for place in places)
    assert row["navigation/active"] > 0.5


@pytest.mark.parametrize("agent", ["dqn", "ddpg"])
def test_schedules_count_frames(agent):
    trainer = run(make(agent, **({"noise": "ou"} if agent == "ddpg" else {})), 2)
    assert int(trainer.policy.frames) == 24
    config = trainer.config
    if agent == "ddpg":
        assert isinstance(trainer.policy, OUNoise)
        assert trainer.policy.state.shape == (6, 2)
        start, end = config.noise_start, config.noise_end
        assert start > end
        assert float(trainer.policy.sigma) == pytest.approx(start + (end - start) * 24 / 64)
    else:
        start, end = config.eps_start, config.eps_end
        assert start > end
        assert float(trainer.policy.epsilon) == pytest.approx(start + (end - start) * 24 / 64)


@agents
def test_rows_are_those_of_vessels(agent):
    trainer = make(agent)
    config = trainer.config
    assert (config.num_streams, config.batch_size, config.rows_per_iteration) == (6, 12, 24)
    assert trainer.collector.num_envs == 6
    run(trainer, 3)
    assert int(trainer.frames) == 36
    assert int(trainer.rows) == 72
    assert trainer.collect().shape == (6, 4)


@pytest.mark.parametrize("agent", ["iqn", "ac-iqn"])
def test_an_update_that_runs_out_of_memory_goes_on_in_parts(agent):
    trainer = make(agent)
    run_ = trainer.micro.run

    def limited(attempt, rows, **others):
        def in_little_memory(parts):
            if parts < 4:
                raise torch.OutOfMemoryError("no room")
            return attempt(parts)

        return run_(in_little_memory, rows, **others)

    trainer.micro.run = limited
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfMemoryWarning)
        run(trainer, 4)
    assert trainer.micro.parts == 4


@pytest.mark.parametrize("agent", ["iqn", "sac"])
def test_the_announced_memory_is_what_an_iteration_takes(agent):
    large = {"num_envs": 32, "num_steps": 4, "total_steps": 100_000, "hidden_size": 64, "capacity": 8_192}
    trainer = make(agent, **{**OWN[agent], "compact": False, **large}, minibatch_size=512, learning_starts=512)
    estimate = trainer.memory_estimate
    with PeakBytes() as held:
        run(trainer, 6)
    assert 0.5 < estimate.total / (held.peak + estimate.rollout + estimate.networks) < 2, (estimate, held.peak)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_reward_that_is_not_finite(on_nan):
    trainer = run(make("dqn", on_nan=on_nan), 3)
    assert trainer.env.base_env.resets_nonfinite == (on_nan == "skip")
    trainer.env.base_env.state_position[0, 0, 0] = torch.nan
    run(trainer, 1)
    verdict = trainer.guard.verdict(trainer.metrics.flush(1))
    assert verdict.action == on_nan
    if on_nan == "skip":
        run(trainer, 3)
        assert all(value.isfinite().all() for value in parameters(trainer).values())
        assert trainer.guard.verdict(trainer.metrics.flush(2)) is None


@pytest.mark.parametrize("agent", ["dqn", "sac"])
def test_sixteen_bits(agent):
    trainer = run(make(agent, precision="bf16"), 5)
    assert trainer.metrics.flush(1)["train/first_bad_iteration"] == -1
    assert all(value.isfinite().all() and value.dtype == torch.float32 for value in parameters(trainer).values())


class TestGivenParts:
    def test_an_env_of_ones_own(self):
        config = KINDS["dqn"](**settings("dqn"))
        base = MarineNavigation(3, action="discrete", curriculum=Curriculum.fixed(2, 0, 0, 15.0), max_obstacles=0)
        trainer = run(TRAINERS["dqn"](config, env=AgentStreams(base)), 3)
        assert trainer.env.base_env is base
        assert "navigation/active" in trainer.metrics.flush(1)

    @pytest.mark.parametrize(
        ("agent", "action", "message"),
        [
            ("dqn", "continuous", r"action_spec: expected discrete actions .*Remedy"),
            ("iqn", "continuous", r"action_spec: expected discrete actions .*Remedy"),
            (
                "ddpg",
                "discrete",
                r"expected continuous actions with finite bounds for ddpg, .*MarineNavigation\(",
            ),
            ("sac", "discrete", r"expected continuous actions with finite bounds for sac, .*agents iqn, dqn and rain"),
        ],
    )
    def test_an_agent_that_does_not_fit_the_actions(self, agent, action, message):
        config = KINDS[agent](**settings(agent))
        env = make_marine_env(config, torch.device("cpu"), action=action)
        with pytest.raises(ValueError, match=message):
            TRAINERS[agent](config, env=env)

    def test_another_number_of_vessels(self):
        config = KINDS["dqn"](**settings("dqn"))
        env = AgentStreams(MarineNavigation(3, action="discrete", max_robots=4, curriculum=Curriculum.fixed(1)))
        with pytest.raises(ValueError, match=r"batch_size \[6\], the config's num_envs \* max_robots, received \[12\]"):
            TRAINERS["dqn"](config, env=env)


@pytest.mark.parametrize("env", ["MarineNavigation", "MarineEmpty"])
@agents
def test_presets(agent, env):
    config = PRESETS[agent][env]
    assert type(config) is KINDS[agent]
    assert (config.env, config.agent, config.algorithm) == (env, agent, f"marine-{agent}")
    stages = config.stages()
    if env == "MarineNavigation":
        assert config.total_steps == 6_000_000
        assert stages["frames"] == (0, 1e6, 2e6, 3e6, 4e6, 5e6)
        assert stages["robots"] == (3, 4, 5, 5, 5, 5)
        assert stages["obstacles"] == (0, 0, 0, 2, 3, 4)
        assert stages["distance"] == (30, 35, 40, 40, 40, 40)
    else:
        assert {name: value for name, value in stages.items() if name != "frames"} == {
            **{"robots": (1,), "obstacles": (0,), "cores": (0,), "distance": (40,)}
        }
