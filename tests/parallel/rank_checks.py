"""What each rank of a test does; the functions are named in ``rank_processes.run``."""

import hashlib
import importlib
import os
import random
import signal
import threading
import time
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf import cli
from torchrl_perf.cli import train
from torchrl_perf.functional.moments import moments_of
from torchrl_perf.parallel import Ranks, SharedGradients, join, leave, watch
from torchrl_perf.registry import ALGORITHMS, SYSTEMS, entry_of
from torchrl_perf.trainers import DDPGConfig, DDPGTrainer, DQNConfig, DQNTrainer, PPOConfig, PPOTrainer
from torchrl_perf.trainers.off_policy.shard_weights import shard_correction
from torchrl_perf.trainers.optim.optimization import GuardedAdam

ENVS, STEPS = 12, 8
"""Of the joint batch; two and three ranks divide them."""
SMALL: dict[str, Any] = {
    **{"num_envs": 12, "num_steps": 4, "total_steps": 4_800, "device": "cpu", "mode": "eager", "hidden_size": 32},
    **{"epochs": 2, "minibatches": 2, "target_kl": 0.01, "normalize_observations": True, "normalize_rewards": True},
    **{"capacity": 480, "minibatch_size": 24, "updates_per_iteration": 2, "learning_starts": 48, "target_interval": 2},
    **{"eps_frames": 960, "noise_frames": 960, "num_quantiles": 8, "num_cosines": 8, "num_atoms": 11},
    **{"sampler": "prioritized"},
}
SYSTEM: dict[str, Any] = {
    **{"num_envs": 6, "num_steps": 4, "total_steps": 960, "device": "cpu", "mode": "eager", "hidden_size": 32},
    **{"epochs": 1, "minibatches": 2, "capacity": 480, "minibatch_size": 12, "learning_starts": 24},
    **{"updates_per_iteration": 2, "num_quantiles": 8, "num_cosines": 8, "num_atoms": 11, "demonstrations": 0},
    **{"critical_nodes": 20, "size": 8, "max_robots": 3, "max_obstacles": 1, "stage_frames": "0", "stage_robots": "3"},
    **{"stage_obstacles": "1", "stage_distance": "30", "self_size": 16, "object_size": 16, "updates": 2, "window": 4},
    **{"history": 40, "plan_horizon": 3, "candidates": 4, "elites": 2, "plan_rounds": 1, "prediction_horizon": 1},
}
"""Settings of a small run of each system."""
RUN = [
    *("train", "ppo", "--device", "cpu", "--num-envs", "12", "--num-steps", "8", "--epochs", "1", "--no-progress"),
    *("--run-dir", "runs", "--log-interval", "2", "--checkpoint-interval", "4", "--hidden-size", "32"),
]
"""A run on the command line, without its length: 96 env steps an iteration."""
NORMALIZED = ["--normalize-observations", "--normalize-rewards", "--checkpoint-interval", "2"]


def fingerprint(trainer: Any) -> str:
    """A hash of every parameter, buffer and moment that ranks have in common."""
    modules = [part for part in trainer.parts().values() if isinstance(part, nn.Module)]
    tensors = [value for module in modules for value in module.state_dict().values() if isinstance(value, Tensor)]
    if hasattr(trainer, "shared") and hasattr(trainer, "model"):  # the planner's memory is a rank's own
        tensors = list(trainer.shared.params)
    optimizers = [part for part in trainer.parts().values() if isinstance(part, GuardedAdam)]
    tensors += [state for one in optimizers for held in one.state.values() for state in held.values()]
    tensors = [tensor for tensor in tensors if tensor.numel() != trainer.config.num_envs]  # returns of this rank's envs
    return hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def part(ranks: Ranks, rows: Tensor) -> Tensor:
    """This rank's part of joint rows."""
    return rows.chunk(ranks.size)[ranks.rank]


def joint_numbers(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shared_gradients() -> dict[str, Any]:
    """A loop of one's own, with PyTorch's Adam and with GuardedAdam, after ranks that began with other parameters."""
    ranks, found = join("cpu"), {}
    rows = part(ranks, joint_numbers(12, 5))
    for kind in (torch.optim.Adam, GuardedAdam):
        torch.manual_seed(ranks.rank)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        shared = SharedGradients(model.parameters())
        start = [value.detach().clone() for value in model.parameters()]
        optimizer = kind(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            loss = model(rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            losses += shared.mean_(loss.detach())
            optimizer.step()
        found[kind.__name__] = {"start": start, "end": [*model.parameters()], "loss": torch.stack(losses)}
    leave()
    return found


def uneven_parts() -> dict[str, Tensor]:
    """Parts of 1, 3, 5 rows and an empty one of NaN; the weight makes the mean that of all rows."""
    ranks = join("cpu")
    sizes = [5, 1, 3][: ranks.size]
    rows = joint_numbers(sum(sizes), 5).split(sizes)[ranks.rank]
    weight = nn.Parameter(joint_numbers(5, seed=1))
    loss = (rows @ weight).square().mean()
    loss.backward()
    shared = SharedGradients([weight], ranks=ranks)
    (mean,) = shared.mean_(loss.detach(), weight=torch.tensor(float(len(rows))))
    found = {"gradient": weight.grad.clone(), "loss": mean}
    loss = rows.sum() / 0.0 if ranks.rank == 0 else loss.detach()
    weight.grad = None if ranks.rank == 0 else torch.ones(5)
    (found["without_first"],) = shared.mean_(loss.detach(), weight=torch.tensor(float(ranks.rank)))
    leave()
    return found


def nan_on_one_rank() -> dict[str, Any]:
    """A gradient that is NaN on the last rank alone: no rank takes the step."""
    ranks = join("cpu")
    model = nn.Linear(3, 1)
    shared = SharedGradients(model.parameters())
    optimizer = GuardedAdam(model.parameters(), lr=1e-2)
    before = [value.detach().clone() for value in model.parameters()]
    loss = model(joint_numbers(4, 3)).sum() * (torch.nan if ranks.rank == ranks.size - 1 else 1.0)
    loss.backward()
    shared.mean_(loss.detach())
    optimizer.step()
    leave()
    return {"before": before, "after": [*model.parameters()]}


def merged_moments() -> Any:
    """The moments of rows of all ranks."""
    ranks = join("cpu")
    found = ranks.merged(moments_of(part(ranks, joint_numbers(24, 3) + 1e4)))
    leave()
    return found


def agreements() -> dict[str, Any]:
    """Values on the host."""
    ranks = join("cpu")
    found = {
        "values": ranks.values(ranks.rank**2),
        "any": ranks.any(ranks.rank == 1),
        "all": ranks.all(ranks.rank == 1),
        "of_first": ranks.of_first(lambda: f"made by {ranks.rank}"),
        "gathered": ranks.gathered(torch.tensor([float(ranks.rank), float("inf")])),
    }
    leave()
    return found


def fingerprint_after(trainer: Any, iterations: int) -> str:
    """What a trainer holds after some iterations, as :func:`fingerprint` has it."""
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    found = fingerprint(trainer)
    trainer.close()
    return found


def equal_ranks() -> dict[str, str]:
    """What ranks have in common after some iterations of each algorithm."""
    join("cpu")
    found = {}
    for name in ("ppo", "pqn", "dqn", "rainbow", "iqn", "sac", "td3"):
        kind, trainer_of = ALGORITHMS[name].load("config"), ALGORITHMS[name].load("trainer")
        known = {field.name for field in fields(kind)} - set(getattr(kind, "not_normalized", ()))
        trainer = trainer_of(kind.without_task(**{key: value for key, value in SMALL.items() if key in known}))
        found[name] = fingerprint_after(trainer, 6)
    leave()
    return found


def equal_systems() -> dict[str, str]:
    """The same of the algorithms and systems whose updates have parts of their own."""
    join("cpu")
    found = {}
    for name in ("ac-iqn", "sac-options", *SYSTEMS):
        entry = entry_of(name)
        kind, trainer_of = entry.load("config"), entry.load("trainer")
        known = {field.name for field in fields(kind)}
        small = {key: value for key, value in SYSTEM.items() if key in known}
        # Options learn from the critics in some presets and from kept choices in others: ranks run both ways.
        kept = {"option_learning": "returns", "option_capacity": 96, "option_interrupt": False}
        for way in (kept, {"option_learning": "critic"}) if "option_learning" in known else ({},):
            found[" ".join([name, *map(str, way.values())])] = fingerprint_after(trainer_of(kind(**small, **way)), 4)
    leave()
    return found


@torch.no_grad()
def fix(trainer: Any) -> None:
    """Gives the networks of a trainer parameters that do not depend on its number of envs."""
    modules = [part for part in trainer.parts().values() if isinstance(part, nn.Module)]
    named = [pair for module in modules for pair in module.state_dict().items()]
    learnt = {value.data_ptr() for module in modules for value in module.parameters()}
    values = [value for name, value in named if value.data_ptr() in learnt or name.startswith("target_")]
    for number, value in enumerate(values):
        value.copy_(0.2 * joint_numbers(*value.shape, seed=100 + number))


def _joint_ppo(ranks: Ranks) -> list[Tensor]:
    config = PPOConfig(
        num_envs=ENVS, num_steps=STEPS, device="cpu", mode="eager", epochs=3, minibatches=1, hidden_size=32, seed=3
    )
    torch.manual_seed(7)
    trainer = PPOTrainer(config)
    fix(trainer)
    batch = trainer.collect().clone()
    numbers = joint_numbers(ENVS, STEPS, 4, seed=5)
    with torch.no_grad():
        batch.set("observation", part(ranks, numbers))
        batch.set("advantage", part(ranks, numbers[..., :1] * 3 + 1))
        batch.set("value_target", part(ranks, numbers[..., 1:2]))
        batch.set("state_value", part(ranks, numbers[..., 2:3]))
        batch.set("action", (part(ranks, numbers[..., 3]) > 0).to(batch.get("action").dtype))
        batch.set("action_log_prob", part(ranks, numbers[..., 0].abs().neg()))
    trainer.update(batch)
    found = [value.detach().clone() for value in trainer.loss.parameters()]
    trainer.close()
    return found


def _joint_off_policy(ranks: Ranks, trainer: Any) -> list[Tensor]:
    fix(trainer)
    batch = trainer.collect().clone()
    width = batch.get("observation").shape[-1]
    rows = 24
    sample = batch.view(-1)[torch.arange(rows // ranks.size) % batch.numel()].clone()
    numbers = joint_numbers(rows, 2 * width + 3, seed=5)
    sample.set("observation", part(ranks, numbers[:, :width]))
    sample.set(("next", "observation"), part(ranks, numbers[:, width : 2 * width]))
    sample.set(("next", "reward"), part(ranks, numbers[:, -1:]))
    action = sample.get("action")
    picked = part(ranks, numbers[:, -2])
    discrete = not action.is_floating_point()
    sample.set("action", (picked > 0).to(action.dtype) if discrete else picked.tanh().view(-1, 1))
    sample.set("priority_weight", part(ranks, numbers[:, -3].abs() + 0.1))
    sample.set("steps_to_next_obs", torch.ones(len(sample), 1, dtype=torch.int64))
    for _ in range(3):
        trainer.update(sample)
    found = [value.detach().clone() for module in trainer.networks() for value in module.parameters()]
    trainer.close()
    return found


def joint_updates(ranks: Ranks | None = None) -> dict[str, list[Tensor]]:
    """Parameters after updates from fixed joint rows, of which each rank has its part."""
    ranks = join("cpu") if ranks is None else ranks
    usual: dict[str, Any] = {"num_envs": ENVS, "device": "cpu", "mode": "eager", "hidden_size": 32, "capacity": 480}
    usual |= {"minibatch_size": 24, "learning_starts": 48}
    found = {"ppo": _joint_ppo(ranks)}
    found["dqn"] = _joint_off_policy(ranks, DQNTrainer(DQNConfig(**usual, num_steps=1)))
    found["ddpg"] = _joint_off_policy(ranks, DDPGTrainer(DDPGConfig(**usual, num_steps=1)))
    leave()
    return found


def sharded_draws() -> dict[str, Tensor]:
    """Rows that each rank draws by priority from its shard, with their weights, and the shard's priorities."""
    ranks = join("cpu")
    from torchrl_perf.replay import make_replay_buffer

    torch.manual_seed(ranks.rank)
    beta = 0.0  # without importance weights, so that weighted draws are those of the priorities
    buffer = make_replay_buffer(32, batch_size=4096, device="cpu", sampler="prioritized", alpha=1.0, beta=beta)
    from tensordict import TensorDict

    buffer.extend(TensorDict({"value": torch.arange(32.0)}, batch_size=[32]))
    priority = (torch.rand(32) + 0.1) * (1 + 3 * ranks.rank)
    buffer.update_priority(torch.arange(32), priority)
    slots, weights = [], []
    for _ in range(4):
        sample = buffer.sample(4096)
        slots.append(sample.get("index"))
        weights.append(sample.get("priority_weight") * shard_correction(buffer.sampler, ranks))
    leave()
    return {"slot": torch.cat(slots), "weight": torch.cat(weights), "priority": priority}


def sums_by_host() -> dict[str, Any]:
    """Ranks of which two share a host: sums in two levels beside those in one, and what a loop learns with either."""
    rank, found = int(os.environ["RANK"]), {}
    ranks_of = importlib.import_module("torchrl_perf.parallel.ranks")
    here = ranks_of.own_place
    ranks_of.own_place = lambda: here()._replace(kernel=f"kernel{rank // 2}")
    joined = join("cpu", by_host=True)
    flat = Ranks(torch.device("cpu"), torch.distributed.group.WORLD)
    for size in (1, 2, 7, 1_000):
        own = joint_numbers(4, size, seed=size)[rank]
        found[size] = joined.summed(own.clone()), flat.summed(own.clone())
    found["gathered"] = joined.gathered(torch.tensor([float(rank)]))
    for name, ranks in (("levels", joined), ("flat", flat)):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        shared = SharedGradients(model.parameters(), ranks=ranks)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            model(part(ranks, joint_numbers(12, 5))).square().mean().backward()
            shared.mean_()
            optimizer.step()
        found[name] = [*model.parameters()]
    leave()
    return found


def uneven_hosts() -> None:
    """Three ranks, of which two share a host, with --by-host."""
    _on_hosts_of_their_own(int(os.environ["RANK"]) // 2)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--by-host"]))


def run_by_host() -> None:
    """A whole run of four ranks on two hosts."""
    _on_hosts_of_their_own(int(os.environ["RANK"]) // 2)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--by-host"]))


def uneven_envs() -> str:
    """A number of envs that ranks do not divide."""
    join("cpu")
    try:
        PPOTrainer(PPOConfig(num_envs=7, num_steps=8, device="cpu"))
    except ValueError as error:
        return str(error)
    finally:
        leave()
    return ""


def other_settings() -> None:
    """Ranks that were started with other options."""
    raise SystemExit(cli.main([*RUN, "--total-steps", str(960 + int(os.environ["RANK"]))]))


def without_gpus() -> None:
    """Ranks that are to have GPUs, on a host without."""
    raise SystemExit(cli.main([*RUN[:2], "--device", "cuda", *RUN[4:], "--total-steps", "960"]))


def without_nccl() -> None:
    """The same where there are GPUs, and a PyTorch without NCCL."""
    torch.cuda.device_count = lambda: 8
    torch.distributed.is_nccl_available = lambda: False
    without_gpus()


def host_without_gpus() -> None:
    """Ranks that take a GPU where there is one, of which the last has none."""
    if os.environ["RANK"] != "2":
        torch.cuda.is_available = torch.distributed.is_nccl_available = lambda: True
        torch.cuda.device_count = lambda: 8
        torch.cuda.set_device = lambda number: None
    raise SystemExit(cli.main([*RUN[:2], *RUN[4:], "--total-steps", "960", "--rank-timeout", "60"]))


def other_versions() -> None:
    """A rank with another version of the package."""
    if os.environ["RANK"] == "1":
        importlib.import_module("torchrl_perf.parallel.join").__version__ = "0.0.1"
    raise SystemExit(cli.main([*RUN, "--total-steps", "960"]))


def bad_settings() -> None:
    """Options that no rank can run."""
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--gamma", "7"]))


def whole_run() -> None:
    """Ten iterations."""
    raise SystemExit(cli.main([*RUN, "--total-steps", "960"]))


def half_run() -> None:
    """Six iterations, with moments of observations and rewards; the last checkpoint is the run's end."""
    raise SystemExit(cli.main([*RUN, "--total-steps", "576", *NORMALIZED]))


def longer_run() -> None:
    """The run of ``half_run`` to its tenth iteration, with as many ranks as there are here."""
    words = ["--resume", "runs/ppo-CartPole-0", "--no-progress", "--total-steps", "960"]
    raise SystemExit(cli.main([*RUN[:2], *words, "--ranks", os.environ["WORLD_SIZE"]]))


def longer_auto() -> None:
    """The same, found by --resume auto."""
    words = ["--total-steps", "960", *NORMALIZED, "--resume", "auto"]
    raise SystemExit(cli.main([*RUN, *words, "--ranks", os.environ["WORLD_SIZE"]]))


COMPACT_DQN = (
    *("train", "dqn", "--device", "cpu", "--num-envs", "12", "--no-progress", "--run-dir", "runs", "--compact"),
    *("--capacity", "600", "--minibatch-size", "12", "--learning-starts", "60"),
)


def other_dqn() -> None:
    """A run of DQN with a compact replay, begun or gone on with."""
    words = [*COMPACT_DQN, "--total-steps", "600"]
    begun = ["--resume", "runs/dqn-CartPole-0", "--total-steps", "1200", "--no-progress"]
    raise SystemExit(cli.main(["train", "dqn", *begun] if os.path.isdir("runs/dqn-CartPole-0") else words))


def other_dqn_auto() -> None:
    """The run of ``other_dqn``, found by --resume auto."""
    words = [*COMPACT_DQN, "--total-steps", "1200"]
    raise SystemExit(cli.main([*words, "--resume", "auto"]))


def resumed_run() -> None:
    """The run of ``killed_run``, from its newest checkpoint to its end."""
    raise SystemExit(cli.main([*RUN[:2], "--resume", "runs/ppo-CartPole-0", "--no-progress"]))


def killed_run() -> None:
    """A rank that is killed within its seventh iteration: the last of them."""
    _kill_at(7, int(os.environ["WORLD_SIZE"]) - 1)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960"]))


def killed_first() -> None:
    """The same of the first rank, which holds the folder and the store."""
    _kill_at(7, 0)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "1"]))


def killed_once() -> None:
    """Under ``torchrun``: the last rank is killed within its seventh iteration, in the run's first life only."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        _kill_at(7, int(os.environ["WORLD_SIZE"]) - 1)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--resume", "auto"]))


def two_hosts() -> None:
    """A whole run of ranks that cannot look at each other's processes, as on hosts of their own."""
    _on_hosts_of_their_own()
    whole_run()


def killed_on_two_hosts() -> None:
    """The same with a rank that is killed, on the second host."""
    _on_hosts_of_their_own()
    killed_run()


def killed_once_on_two_hosts() -> None:
    """A rank of the second host that is killed in the run's first life."""
    _on_hosts_of_their_own()
    killed_once()


def _on_hosts_of_their_own(number: int | None = None) -> None:
    """Each agent of ``torchrun`` stands for a host, or this process is on that of a number."""
    here, name = watch.own_place, os.environ["GROUP_RANK"] if number is None else str(number)
    for module in (watch, importlib.import_module("torchrl_perf.parallel.ranks")):
        module.own_place = lambda: here()._replace(host=f"host{name}", kernel=f"kernel{name}")


def stopped_run() -> None:
    """The last rank is stopped, as by a debugger, and says nothing from then on."""
    watch.SILENT_BEATS = 10
    _at(7, int(os.environ["WORLD_SIZE"]) - 1, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "3"]))


def hanging_run() -> None:
    """The last rank does not come back from an iteration."""
    _at(7, int(os.environ["WORLD_SIZE"]) - 1, lambda _: time.sleep(1_000))
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "4", "--rank-timeout", "6"]))


def stuck_run() -> None:
    """No rank comes back from an iteration, as where each waits for its GPU in the same collective."""
    for rank in range(int(os.environ["WORLD_SIZE"])):
        _at(7, rank, lambda _: time.sleep(1_000))
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "8", "--rank-timeout", "6"]))


def lost_while_made() -> None:
    """The last rank is killed before it has made its trainer."""
    _kill_while_made(lambda: os.kill(os.getpid(), signal.SIGKILL), int(os.environ["WORLD_SIZE"]) - 1)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "5"]))


def stopped_while_made() -> None:
    """The last rank is asked to stop before it has made its trainer."""
    _kill_while_made(lambda: os.kill(os.getpid(), signal.SIGTERM), int(os.environ["WORLD_SIZE"]) - 1)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "5"]))


def lost_at_the_beginning() -> None:
    """The last rank is killed when all have met and do not watch each other yet."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        ranks = vars(importlib.import_module("torchrl_perf.cli.ranks"))
        ranks["compare"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960"]))


def nan_run() -> None:
    """A number of the last rank's batch becomes NaN after the batch was looked at."""

    def spoil(batch: Any) -> None:
        batch.set("action_log_prob", batch.get("action_log_prob") * torch.nan)

    _at(7, int(os.environ["WORLD_SIZE"]) - 1, spoil)
    raise SystemExit(cli.main([*RUN, "--total-steps", "960", "--seed", "6"]))


LIVES = [*RUN, "--total-steps", "57600", "--seed", "7", "--resume", "auto"]


def not_killed() -> None:
    """The run of ``killed_after_...`` to its end."""
    raise SystemExit(cli.main(LIVES))


def _killed_after(number: int) -> None:
    """One rank is killed after a time of its own, from the moment when the trainer is made.

    Twenty such times are 28 s. At 100 ms or more an iteration none of these lives is the run's end, of 600 iterations.
    """
    seconds, update = random.Random(number).uniform(0.0, 3.0), PPOTrainer.update

    def slow(self: Any, batch: Any) -> None:
        time.sleep(0.1)
        update(self, batch)

    PPOTrainer.update = slow
    _kill_while_made(lambda: threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start(), number % 2)
    raise SystemExit(cli.main(LIVES))


def __getattr__(name: str) -> Any:
    """``killed_after_3`` and so on."""
    kind, _, number = name.rpartition("_")
    if kind != "killed_after":
        raise AttributeError(name)
    return lambda: _killed_after(int(number))


def _kill_while_made(kill: Any, rank: int) -> None:
    make = train.make_trainer

    def made(*given: Any) -> Any:
        if int(os.environ["RANK"]) == rank:
            kill()
        return make(*given)

    train.make_trainer = made


def _kill_at(iteration: int, rank: int) -> None:
    """Kills this process within an iteration, if it is that rank."""
    _at(iteration, rank, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _at(iteration: int, rank: int, do: Any) -> None:
    """Does something with the batch of an iteration, on that rank."""
    update = PPOTrainer.update

    def changed(self: Any, batch: Any) -> None:
        if self.iterations_done == iteration - 1 and self.ranks.rank == rank:
            do(batch)
        update(self, batch)

    PPOTrainer.update = changed
