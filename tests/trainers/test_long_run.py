"""Ten thousand captured iterations: flat memory, fresh noise, and results that logging does not touch."""

import pytest
import torch

from torchrl_perf.trainers import PPOConfig, PPOTrainer

ITERATIONS = 10_000


def captured(**changes):
    config = PPOConfig(
        num_envs=64, num_steps=8, epochs=1, minibatches=1, total_steps=64 * 8 * ITERATIONS, logger="none", **changes
    )
    trainer = PPOTrainer(config)
    for _ in range(4):
        trainer.step()
    return trainer


@pytest.mark.gpu
@pytest.mark.slow
def test_ten_thousand_iterations():
    trainer = captured()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    seen = []
    for k in range(ITERATIONS - 4):
        trainer.step()
        if k % 1000 == 0:
            seen.append(trainer.collector.batch["action"].clone())
            trainer.metrics.flush(k)
    torch.cuda.synchronize()
    kept = sum(action.nbytes for action in seen)
    assert torch.cuda.memory_allocated() - before <= kept + 64 * 512 * len(seen)
    # the noise is fresh: with the same policy throughout, equal batches of 512 coin flips would be a miracle
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert int(trainer.collector.frames) == 64 * 8 * ITERATIONS
    assert all(p.isfinite().all() for p in trainer.loss.parameters())
    trainer.close()


@pytest.mark.gpu
def test_returns_do_not_depend_on_the_interval_of_logging():
    ends = []
    for interval in (1, 50):
        trainer = captured()
        for k in range(100):
            trainer.step()
            if k % interval == 0:
                trainer.metrics.flush(k)
        ends.append((float(trainer.episodes.mean_return), [p.detach().clone() for p in trainer.loss.parameters()]))
        trainer.close()
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.gpu
def test_a_whole_iteration_runs_under_sync_debug_mode_error():
    trainer = captured()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(trainer.episodes.count) > 0
    trainer.close()
