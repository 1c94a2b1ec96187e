"""The claims of active_dynamics on its agent: the belief, a step with its plan, what the dropped correction does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from studies.active_dynamics.loops import end_to_end, memory, release, settings_of, trained, utilisation
from studies.active_dynamics.loss import make_model
from studies.originals.latent_agent import encoded_again
from studies.sitting import (
    CONFIRMED,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    judge,
    times_text,
)
from torchrl_perf.modules.icem import ICEMPlanner, ICEMSettings
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.evaluation import fit_alignment, prediction_scores, record
from torchrl_perf.systems.active_dynamics.information_reward import InformationReward
from torchrl_perf.systems.active_dynamics.networks import make_field_env
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE

LENGTH, DRIFT = 20, 100
AGAIN, DROPPED, CELL = "window encoded again", "prediction, correction dropped", "one cell"
CELL_GRAPH, AGAIN_GRAPH = "one cell, in a graph", "window encoded again, in a graph"


# -- the belief -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """The first 20 steps of an episode, and the filter's state before the last of them.

    Attributes:
        observation: ``[B, 20, O]``.
        previous: inputs before each step, ``[B, 20, D]``.
        hidden: ``[B, H]``.
        belief: ``[B, S]``, of the step before the last.
    """

    observation: Tensor
    previous: Tensor
    hidden: Tensor
    belief: Tensor


@torch.no_grad()
def episode(model: SeqVAE, batch: int, device: torch.device) -> Episode:
    """Counts and inputs at random, filtered up to the step before the last."""
    draw = torch.Generator().manual_seed(6)
    observation = torch.poisson(torch.full((batch, LENGTH, 20), 1.0), generator=draw).to(device)
    previous = (torch.randn(batch, LENGTH, 2, generator=draw) * 0.3).to(device)
    previous[:, 0] = 0.0
    starts = torch.zeros(batch, LENGTH - 1, dtype=torch.bool, device=device)
    found = model.encode(observation[:, :-1], previous[:, 1:], starts)
    return Episode(observation, previous, cast("Tensor", found.hidden), found.loc[:, -1])


def beliefs(sitting: Sitting) -> None:
    """The state after an observation: all of the window again, the model's prediction, one cell."""
    sizes = sitting.pick((1, 64), (1, 64, 1024))
    torch.manual_seed(0)
    model = make_model(sitting.device)
    for batch in sizes:
        _belief_case(sitting, model, batch)
    dropped = sitting.ratio_of("belief", AGAIN, DROPPED)
    sitting.verdict(
        "belief",
        "state updates are 50-70% faster",
        times_text(dropped),
        judge(dropped, 2.0, 1.1),
        "by leaving the observation out: see drift",
    )
    cell = sitting.ratio_of("belief", AGAIN, CELL)
    text = times_text(cell)
    if sitting.cuda:
        text += f"; both in graphs {times_text(sitting.ratio_of('belief', AGAIN_GRAPH, CELL_GRAPH))}"
    remark = "O(1) instead of O(L), the same belief"
    sitting.verdict("belief", "a carried hidden state is 50-70% faster", text, judge(cell, 2.0, 1.1), remark)
    _truncated(sitting, model)


def _belief_case(sitting: Sitting, model: SeqVAE, batch: int) -> None:
    data = episode(model, batch, sitting.device)
    calls = belief_calls(model, data)
    variants = [Variant(AGAIN, calls[AGAIN]), Variant(CELL, calls[CELL])]
    note = "another state than that of the observation"
    variants.append(Variant(DROPPED, calls[DROPPED], compared=False, note=note))
    graphs = {}
    if sitting.cuda:
        graphs = {name: sitting.graph(calls[of]) for name, of in ((AGAIN_GRAPH, AGAIN), (CELL_GRAPH, CELL))}
        variants += [Variant(name, graph) for name, graph in graphs.items()]
    sitting.compare("belief", f"B={batch}, L={LENGTH}", variants, tolerance=1e-4 if sitting.cuda else 1e-5)
    for graph in graphs.values():
        graph.release()


def belief_calls(model: SeqVAE, data: Episode) -> dict[str, Callable[[], Tensor]]:
    """The three ways to the belief of the last step, ``[B, S]``."""
    window = {"observation": data.observation, "previous": data.previous}
    newest = data.observation[:, -1], data.previous[:, -1]
    calls: dict[str, Callable[[], Tensor]] = {
        AGAIN: lambda: encoded_again(model, window),
        DROPPED: lambda: model.dynamics(data.belief, newest[1]),
        CELL: lambda: model.encoder(*newest, data.hidden).loc,
    }
    return {name: partial(torch.no_grad()(call)) for name, call in calls.items()}


@torch.no_grad()
def _truncated(sitting: Sitting, model: SeqVAE) -> None:
    """How far the belief of the last 20 steps alone is from that of the whole episode, behind the first 20."""
    device, steps = sitting.device, 60
    draw = torch.Generator().manual_seed(6)
    observation = torch.poisson(torch.full((64, steps, 20), 1.0), generator=draw).to(device)
    action = (torch.randn(64, steps, 2, generator=draw) * 0.3).to(device)
    starts = torch.zeros(64, steps, dtype=torch.bool, device=device)
    whole = model.encode(observation, action, starts).loc[:, -1]
    part = slice(steps - LENGTH, None)
    found = model.encode(observation[:, part], action[:, part], starts[:, part]).loc[:, -1]
    off = float((found - whole).abs().max())
    note = f"off by {off:.1e}: what came before the window is forgotten"
    sitting.add("belief", f"step {steps}", AGAIN, truncated_by=off, note=note)


# -- a step of the agent ----------------------------------------------------------------------------------------------


def agent_step(sitting: Sitting) -> None:
    """The belief and a plan for it, which is what a step of the agent consists of."""
    sizes = sitting.pick((1,), (1, 64), (1, 64, 1024))
    settings = sitting.pick(ICEMSettings(iterations=2, candidates=16), ICEMSettings())
    torch.manual_seed(0)
    model = make_model(sitting.device)
    reward = InformationReward(model.dynamics, "fisher_d")
    spec = make_field_env(ActiveDynamicsConfig.without_task(), sitting.device, 1).action_spec
    planner = ICEMPlanner(model.dynamics, reward, spec=spec, settings=settings, state_key="belief")
    for batch in sizes:
        _step_case(sitting, model, planner, batch)
    after = sitting.ratio_of("agent-step", AGAIN, DROPPED)
    share = min(1 / value for value in (*after, 1.0))
    remark = f"the plan alone is {share:.0%} of a step or more, and the change leaves it as it is"
    sitting.verdict("agent-step", "agent steps are 50-70% faster", times_text(after), judge(after, 2.0, 1.1), remark)
    ours = sitting.ratio_of("agent-step", AGAIN, CELL_GRAPH if sitting.cuda else CELL)
    sitting.verdict(
        "agent-step",
        "the package's steps are 50-70% faster, with the correction",
        times_text(ours),
        judge(ours, 2.0, 1.1),
    )
    own = [row for row in sitting.rows if row["experiment"] == "agent-step" and row["variant"] == CELL and "us" in row]
    note = ", ".join(f"{row['us'] / batch:,.1f} us at {row['case']}" for row, batch in zip(own, sizes, strict=False))
    sitting.add("agent-step", "for each point", CELL, note=note)


def _step_case(sitting: Sitting, model: SeqVAE, planner: ICEMPlanner, batch: int) -> None:
    data, settings = episode(model, batch, sitting.device), planner.settings
    calls, device = belief_calls(model, data), sitting.device
    plan = torch.zeros(batch, settings.horizon, 2, device=device)
    elites = torch.zeros(batch, settings.kept, settings.horizon, 2, device=device)

    @torch.no_grad()
    def step(update: Callable[[], Tensor]) -> Tensor:
        return planner.decide(update(), plan, elites, None, planner.draw(batch)).action

    variants = [
        Variant(name, partial(step, calls[name]), calls[name], compared=name != DROPPED)
        for name in (AGAIN, CELL, DROPPED)
    ]
    graph = sitting.graph(partial(step, calls[CELL])) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(CELL_GRAPH, graph, compared=False, note="the same function, recorded"))
    tolerance = 1e-4 if sitting.cuda else 1e-5
    sitting.compare("agent-step", f"B={batch}", variants, tolerance=tolerance)
    if graph is not None:
        graph.release()


# -- what the dropped correction does ---------------------------------------------------------------------------------


def drift(sitting: Sitting) -> None:
    """The belief of a model that was trained, with the correction, and 100 steps without it, and the true state."""
    config = replace(
        settings_of(sitting, 0), num_envs=8, num_steps=25, minibatch_size=16, updates=10, inputs="random", history=200
    )
    trainer, iterate, _ = trained(config, sitting.device, sitting.pick(3, 40))
    env = make_field_env(config, sitting.device, sitting.pick(32, 128), 0)
    batch = record(trainer.model, env, steps=DRIFT + 41, seed=1)[:, LENGTH:]
    alignment = fit_alignment(batch.get("belief"), batch.get("latent"))
    scores = prediction_scores(trainer.model, batch, DRIFT, alignment)
    apart = _apart(trainer.model, batch)
    for steps in (0, 1, 10, DRIFT):
        row = {"r2": float(scores.r2[steps]), "apart": 0.0 if not steps else float(apart[steps - 1])}
        note = f"R^2 of the true state {row['r2']:.3f}; {row['apart']:.2f} standard deviations from the belief"
        sitting.add("drift", f"{steps} steps", DROPPED if steps else CELL, **row, note=note)
    release(iterate)
    trainer.close()
    first, last = float(scores.r2[0]), float(scores.r2[DRIFT])
    text = f"R^2 {first:.2f} with the correction, {last:.2f} after {DRIFT} steps without it"
    word = CONFIRMED if last >= first - 0.05 else PARTLY if last >= 0.5 * first else NOT_REPRODUCED
    remark = f"{float(apart[-1]):.2f} standard deviations apart: the model runs without observations"
    sitting.verdict("drift", "state tracking is as good without the encoder", text, word, remark)


@torch.no_grad()
def _apart(model: SeqVAE, batch: TensorDictBase) -> Tensor:
    """Root mean square of prediction minus belief 1 to 100 steps on, in deviations of the belief, ``[100]``."""
    belief, action = cast("Tensor", batch.get("belief")), cast("Tensor", batch.get("action"))
    ahead = model.predict(belief[:, 0], action[:, :DRIFT])
    off = (ahead - belief[:, 1 : DRIFT + 1]).square().mean((0, 2)).sqrt()
    return off / belief.std((0, 1)).square().mean().sqrt()


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "belief": beliefs,
    "agent-step": agent_step,
    "drift": drift,
    "memory": memory,
    "end-to-end": end_to_end,
    "utilisation": utilisation,
}
"""Experiments by name."""
