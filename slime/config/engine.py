"""Options of the inference engines: how many, where they listen, how they generate. Upstream's
`--sglang-*` names.
"""

from __future__ import annotations

import dataclasses

from slime.config.option import LONGEST_WAIT, option


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Inference engines"""

    rollout_num_engines: int | None = option(
        None,
        (
            "Number of engines to start. None: rollout_num_gpus // rollout_num_gpus_per_engine, "
            "and 1 "
            "when neither is given."
        ),
        minimum=1,
    )
    rollout_external_engine_addrs: list[str] | None = option(
        None,
        (
            "URLs of running SGLang-compatible servers to use in place of starting engines, e.g. "
            "http://10.0.0.5:30000."
        ),
    )
    rollout_engine_device: str = option(
        "auto",
        "Device of the embedded engine; auto: as --accelerator.",
        choices=("auto", "cpu", "cuda"),
    )
    rollout_engine_threads: int = option(
        1,
        (
            "Torch threads of one CPU engine. Deterministic inference on CPU needs 1: more threads "
            "split sums differently."
        ),
        minimum=1,
    )
    rollout_engine_start_timeout: float = option(
        600.0,
        (
            "Seconds an engine may take to load its weights and answer /health; with "
            "--use-fault-tolerance also those that requests wait where no engine is left."
        ),
        above=0,
        maximum=LONGEST_WAIT,
    )

    use_fault_tolerance: bool = option(
        False,
        (
            "Replace an engine that dies or freezes: its requests are sent again, with the same "
            "seeds, to another engine or to its successor, which serves the published weights. "
            "Without it the run ends and names the engine."
        ),
    )
    rollout_health_check_interval: float = option(
        30.0,
        "Seconds between two health checks of an engine, with --use-fault-tolerance.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    rollout_health_check_timeout: float = option(
        30.0,
        (
            "Seconds that an engine may take to answer a health check before it counts as frozen; "
            "one that is dead is noticed at once."
        ),
        above=0,
        maximum=LONGEST_WAIT,
    )
    rollout_health_check_first_wait: float = option(
        0.0,
        "Seconds before the first health check of an engine that has just started.",
        minimum=0,
        maximum=LONGEST_WAIT,
    )

    sglang_server_concurrency: int = option(
        512, "Requests in flight per engine, at most, from the rollout client.", minimum=1
    )
    sglang_host: str = option(
        "127.0.0.1", "Address the engines bind to. Anything but loopback needs a key."
    )
    sglang_port: int | None = option(
        None,
        (
            "Port of the first engine, engine i listens on port + i. None: the system chooses free "
            "ports."
        ),
        minimum=1,
        maximum=65535,
    )
    sglang_api_key: str | None = option(
        None,
        (
            "Key that clients send as `Authorization: Bearer KEY` to engines and router. None: a new "
            "one for each run, but none for --rollout-external-engine-addrs. Never written to "
            "recorded options."
        ),
    )
    no_api_key: bool = option(
        False,
        (
            "Start engines and router without a key: any process of this machine can then pause "
            "them and replace their weights."
        ),
    )
    sglang_served_model_name: str | None = option(
        None, "Name the engine reports for its model. None: the --hf-checkpoint folder."
    )

    sglang_dtype: str = option(
        "auto",
        "Data type of weights and KV cache; auto is the trainer's (--bf16, --fp16, else float32).",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    sglang_context_length: int | None = option(
        None,
        (
            "Prompt plus response tokens of one request, at most. None: the model's "
            "max_position_embeddings."
        ),
        minimum=1,
    )
    sglang_max_running_requests: int | None = option(
        None,
        (
            "Sequences generated at once, at most; further requests wait. None: 1024, fewer if "
            "memory "
            "for their KV cache is short."
        ),
        minimum=1,
    )
    sglang_max_total_tokens: int | None = option(
        None, "Tokens the KV cache holds. None: from --sglang-mem-fraction-static.", minimum=1
    )
    sglang_mem_fraction_static: float | None = option(
        None,
        (
            "Part of the device's free memory for weights and KV cache. None: 0.8 on a GPU, 0.2 on "
            "a "
            "CPU that others share."
        ),
        above=0,
        maximum=1,
    )
    sglang_max_prefill_tokens: int = option(
        4096,
        "Prompt tokens of one forward pass, more than one prompt together, at most.",
        minimum=1,
    )
    sglang_disable_radix_cache: bool = option(
        False, "Switch off the reuse of a prompt's KV cache by later requests with the same prompt."
    )
    sglang_enable_deterministic_inference: bool = option(
        False,
        "Tokens and log-probs of a request with a sampling_seed depend on nothing but its prompt, "
        "its seed, its parameters and the weights:"
        " not on what else is in the batch.",
    )
    sglang_random_seed: int = option(42, "Seed for requests without a sampling_seed.")

    use_sglang_router: bool = option(
        False, "Put the sglang-router (extra `router`) in front of the engines."
    )
    sglang_router_ip: str | None = option(
        None, "Address of a router that runs already. None: start one, if --use-sglang-router."
    )
    sglang_router_port: int | None = option(
        None, "Port of the router. None: a free one.", minimum=1, maximum=65535
    )
    sglang_router_policy: str = option(
        "cache_aware",
        "How the router chooses an engine.",
        choices=("cache_aware", "round_robin", "random", "power_of_two"),
    )
