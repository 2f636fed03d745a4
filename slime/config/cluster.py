"""Options of the machines: which accelerator, how many processes of which kind, and which of them
share a device.
"""

from __future__ import annotations

import dataclasses

from slime.config.option import LONGEST_WAIT, option


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Machines and processes (on a CPU machine, read "gpus" as "processes")."""

    accelerator: str = option(
        "auto",
        (
            "Device of training (engines: --rollout-engine-device); auto: CUDA where torch was "
            "built "
            "for it and a device is visible."
        ),
        choices=("auto", "cpu", "cuda"),
    )
    actor_num_nodes: int = option(1, "Nodes that train the policy.", minimum=1)
    actor_num_gpus_per_node: int | None = option(
        None, "Training ranks per node; None: 8 with CUDA, 1 on a CPU machine.", minimum=1
    )
    critic_num_nodes: int | None = option(
        None, "Nodes that train the critic; None: as the policy.", minimum=1
    )
    critic_num_gpus_per_node: int | None = option(
        None, "Critic ranks per node; None: as the policy.", minimum=1
    )
    rollout_num_gpus: int | None = option(
        None,
        (
            "GPUs of all engines together; None: those of training with --colocate, else what "
            "--rollout-num-engines need."
        ),
        minimum=0,
    )
    rollout_num_gpus_per_engine: int = option(
        1, "GPUs of one engine. The embedded engine runs on one device.", minimum=1
    )
    colocate: bool = option(
        False, "Training and engines share devices and take turns; turns offloading on."
    )
    offload: bool = option(False, "Short for --offload-train and --offload-rollout.")
    offload_train: bool | None = option(
        None,
        "Move weights, gradients and optimizer state out of the device's memory while engines "
        "generate: to host memory, on a CPU machine to "
        "an unnamed file on the run folder's disk; None: with --colocate.",
    )
    offload_rollout: bool | None = option(
        None,
        "Let engines give their KV cache's memory back while training runs; None: with --colocate.",
    )
    release_train: bool = option(
        False,
        (
            "End the training processes while engines generate, with their state in suspended/ of "
            "the "
            "run folder, and start them again."
        ),
    )
    keep_old_actor: bool = option(
        False,
        (
            "Keep a copy of the weights that the engines use, for old log-probs in the "
            "asynchronous "
            "loop."
        ),
    )
    train_env_vars: dict = option(
        {}, "Environment variables of the training processes, as a JSON object of texts."
    )
    megatron_config_path: str | None = option(
        None,
        (
            "YAML file with options of one role: `megatron: [{role: critic, overrides: {lr: "
            "1.0e-5}}]`."
        ),
    )
    train_backend: str = option("megatron", "Training backend.", choices=("megatron",))
    ray_address: str | None = option(
        None,
        (
            "Address of a running Ray cluster; None: a private one on this machine, ended with the "
            "run."
        ),
    )
    num_cpus: int | None = option(
        None, "Cores that the private Ray cluster offers; None: those of the machine.", minimum=1
    )
    startup_timeout: float = option(
        900.0,
        "Seconds that engines and training ranks may take to load and answer.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    step_timeout: float = option(
        7200.0,
        (
            "Seconds that one rollout, training step, save, weight update or evaluation may take "
            "before the run stops."
        ),
        above=0,
        maximum=LONGEST_WAIT,
    )
    update_weights_interval: int = option(
        1, "Rollouts between two weight updates in slime train-async.", minimum=1
    )
    num_critic_only_steps: int = option(
        0, "First rollouts in which only the critic trains.", minimum=0
    )
