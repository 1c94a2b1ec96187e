"""Loops of one's own on several ranks: the example, captured or not, and a script of TorchRL's parts."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

from torchrl_perf.envs import CartPole
from torchrl_perf.parallel import Ranks, SharedGradients, join, leave
from torchrl_perf.trainers import GuardedAdam, PPOConfig, PPOTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_ranks.py"


def _hash(shared: SharedGradients) -> str:
    """Of the parameters."""
    held = b"".join(param.detach().numpy().tobytes() for param in shared.params)
    return hashlib.sha256(held).hexdigest()


def example() -> dict[str, Any]:
    """The example, eagerly and captured: what is learnt, and the return."""
    spec = importlib.util.spec_from_file_location("example_ppo_ranks", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: list[SharedGradients] = []
    shared = module.SharedGradients
    module.SharedGradients = lambda params: made.append(shared(params)) or made[-1]
    module.leave = lambda: None  # one group for both
    returns = [module.main(iterations=5, num_envs=24, eager=eager) for eager in (True, False)]
    leave()
    return {"parameters": [_hash(one) for one in made], "returns": returns}


def many_updates() -> dict[str, str]:
    """What ranks have after 10,000 updates of a loop of one's own, of rows that differ, and after 800 of PPO."""
    ranks = join("cpu")
    torch.manual_seed(ranks.rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    shared = SharedGradients(model.parameters())
    optimizer = GuardedAdam(model.parameters(), lr=3e-3, max_grad_norm=0.5)
    rows = torch.randn(10_000, 8, 5)
    for row in rows:
        optimizer.zero_grad()
        (model(row) - row[:, :2].sin()).square().mean().backward()
        shared.mean_()
        optimizer.step()
    found = {"own": _hash(shared)}
    config = PPOConfig(num_envs=12, num_steps=8, epochs=2, minibatches=2, device="cpu", mode="eager", hidden_size=16)
    trainer = PPOTrainer(config)
    for _ in range(200):
        trainer.step()
        trainer.iterations_done += 1
    found["ppo"] = _hash(trainer.shared)
    trainer.close()
    leave()
    return found


def torchrl_script() -> dict[str, Any]:
    """TorchRL's collector, advantages, loss and PyTorch's Adam, with the three lines of ``SharedGradients``."""
    ranks = join("cpu")
    torch.manual_seed(ranks.rank)
    env = CartPole(6)
    logits = TensorDictModule(MLP(4, 2, num_cells=[16]), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True, spec=env.full_action_spec
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(actor, critic)
    shared = SharedGradients(loss_module)
    before = _hash(shared)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    losses = []
    for batch in Collector(env, actor, frames_per_batch=96, total_frames=480):
        with torch.no_grad():
            advantage(batch)
        for rows in batch.reshape(-1)[torch.randperm(96)].split(48):
            found = loss_module(rows)
            loss = found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            losses += shared.mean_(loss.detach())
            optimizer.step()
    leave()
    return {"before": before, "after": _hash(shared), "losses": torch.stack(losses), "observed": batch["observation"]}


def targets() -> dict[str, Any]:
    """TorchRL's DQN loss and its soft target updates, of rows of each rank and of all rows in a process alone."""
    ranks = join("cpu")
    rows = torch.randn(40, 2, 6, 4, generator=torch.Generator().manual_seed(3))
    found = {}
    for name, those in (("ranks", ranks), ("alone", Ranks.alone())):
        torch.manual_seed(those.rank)
        actor = QValueActor(MLP(4, 2, num_cells=[8]), in_keys=["observation"], action_space="categorical")
        loss_module = DQNLoss(actor, action_space="categorical", delay_value=True)
        updater = SoftUpdate(loss_module, tau=0.05)
        shared = SharedGradients(loss_module, ranks=those)
        optimizer = torch.optim.SGD(shared.params, lr=0.1, momentum=0.9)
        for row in rows:
            batch = _transitions(row[those.rank] if those.several else row.flatten(0, 1))
            optimizer.zero_grad()
            loss = loss_module(batch)["loss"]
            loss.backward()
            shared.mean_(loss.detach())
            optimizer.step()
            updater.step()
        found[name] = [value.detach().clone() for value in (*shared.params, *loss_module.buffers())]
    leave()
    return found


def _transitions(observation: torch.Tensor) -> TensorDict:
    """Steps whose actions and rewards follow from observations."""
    after = {"observation": observation.roll(1, -1), "reward": observation[:, :1].sign()}
    after |= {name: torch.zeros(len(observation), 1, dtype=torch.bool) for name in ("done", "terminated")}
    return TensorDict(
        {"observation": observation, "action": (observation[:, 1] > 0).long(), "next": after}, [len(observation)]
    )
