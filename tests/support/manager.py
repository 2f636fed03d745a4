"""A `RolloutManager` without Ray and engines, over samples that a test hands it."""

from __future__ import annotations

import math
import types

from support.gate_samples import sound_sample
from support.rollout_args import rollout_args

from slime.ray import rollout as manager_module
from slime.tracking import tracking


def manager_of(samples, tmp_path, monkeypatch, **options):
    """A RolloutManager without Ray and engines: its own constructor, and `generate` over a function
    that returns `samples` as they are.
    """
    servers = types.SimpleNamespace(
        client_urls=[], engines=[], living={}, urls=[], router=None, failures=lambda: []
    )
    args = rollout_args(run_dir=str(tmp_path), global_batch_size=len(samples), rollout_batch_size=len(samples) // 4, hf_checkpoint=None,
                        n_samples_per_prompt=4, advantage_estimator="grpo", rollout_global_dataset=False, **options)  # fmt: skip
    replaced = {
        "configure_logger": lambda *a, **k: None,
        "init_tracking": lambda *a, **k: None,
        "start_rollout_servers": lambda *a: servers,
    }
    for name, value in {**replaced, "Lock": types.SimpleNamespace(remote=lambda: None)}.items():
        monkeypatch.setattr(manager_module, name, value)
    monkeypatch.setattr(manager_module.ray, "put", lambda shard: shard)
    manager = manager_module.RolloutManager(args, ())
    manager.logged = {}
    for module in (manager_module, tracking):
        monkeypatch.setattr(
            module, "log", lambda args, metrics, step_key: manager.logged.update(metrics)
        )
    manager.generate_rollout = lambda args, rollout_id, source, evaluation: samples
    manager.eval_generate_rollout = lambda args, rollout_id, source, evaluation: {
        "set": evaluated(samples)
    }
    manager.set_train_parallel_config(
        {
            "dp_size": 2,
            "cp_size": 1,
            "tp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
    )
    return manager


def evaluated(samples):
    return {
        "rewards": [0.5] * len(samples),
        "truncated": [False] * len(samples),
        "samples": samples,
    }


def dirty_rollout():
    """Sixteen samples of four groups that no scoring has seen; five of them must never reach a
    gradient.
    """
    samples = [sound_sample(i, length=6 + i, reward=float(i % 3)) for i in range(16)]
    samples[1].rollout_log_probs[2] = math.nan
    samples[4].tokens[-1] = -7
    samples[6].reward = "excellent"
    samples[11] = sound_sample(11, length=0, response="", rollout_log_probs=[], reward=50.0)
    samples[14].finish_reason = "length"
    return samples
