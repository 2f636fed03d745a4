"""The house as a table: which floor each module stands on, and every exception from the rules of
tools/repo_shape.py with its reason.
"""

from __future__ import annotations

# The floors from the ground up: a module imports from its own floor and from those below. The first
# pattern that fits a module gives its floor, so a module may stand on another floor than its folder.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("slime", "slime.exceptions", "slime.tested_versions", "slime.typing"),
    ("slime.config*", "slime.files.atomic", "slime.algorithms.table"),
    (
        "slime.utils",
        "slime.utils.doors",
        "slime.utils.misc",
        "slime.utils.async_utils",
        "slime.plugins.watched_calls",
    ),
    ("slime.algorithms*",),
    ("slime.data*",),
    ("slime.accelerator*",),
    ("slime.plugins*",),
    ("slime.files*",),
    ("slime.models*",),
    ("slime.tracking*",),
    ("slime.supervision*",),
    ("slime.utils.processing_utils", "slime.utils.http_utils"),
    ("slime.prompts*",),
    ("slime.gate*",),
    ("slime.metrics*",),
    ("slime.recording*",),
    ("slime.rollout*",),
    ("slime.ray.actors", "slime.ray.utils", "slime.ray.ray_actor", "slime.ray.servers"),
    ("slime.ray.train_actor",),
    ("slime.utils.data", "slime.backends*", "slime.utils.ppo_utils"),
    ("slime.ray*",),
    ("slime.preflight*", "slime.utils.arguments"),
    ("slime.utils*", "slime.observability*"),
    ("slime.harness*",),
    ("slime.view*",),
    ("slime.commands.launch",),
    ("slime.train", "slime.train_async", "slime.local", "slime.testing*"),
    ("slime.commands*",),
    ("slime.cli",),
    ("examples*", "tools*"),
    ("tests*",),
)
GROUND = 1  # floors with the standard library only: the ground and slime.config
# Floors whose modules are functions from values to values.
CORES = (
    "slime.algorithms",
    "slime.data",
    "slime.models",
    "slime.gate",
    "slime.metrics.contributions",
)

CONTAINERS = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "Counter",
    "deque",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
}
CHANGES = {
    "append",
    "add",
    "update",
    "pop",
    "popitem",
    "clear",
    "remove",
    "discard",
    "extend",
    "insert",
    "setdefault",
    "appendleft",
    "popleft",
}

ANY_ADDRESS = ".".join("0000")
FORBIDDEN_BELOW_EDGES = ("ray", "megatron", "sglang", "sglang_router", "wandb", "aiohttp")

# Private names of other packages' objects that have no public one.
FOREIGN_PRIVATE = {
    "_actions": "argparse's options of a parser",
    "_cdata": "torch's identity of a storage",
    "_get_model_param_range_map": "Megatron-core's place of a parameter in an optimizer shard",
    "_version": "torch's count of a tensor's edits",
}
UPSTREAM_NAME = "the name is upstream's, and private there too"
REGISTRY = "filled by decorators while the module is imported"
WARNED_ONCE = "what a process has warned of already"
UPSTREAMS_STATE = "upstream's functions set and read it without an argument for it"
SHORT_NAMESPACE = (
    "upstream's tests call this with a namespace that has only the options they are about"
)

# (rule, path or path::function, reason)
EXCEPTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "args",
        "slime/config/derive.py",
        "derivation is the last part of parsing; the namespace is final after it",
    ),
    (
        "stdlib",
        "slime/config/yaml_file.py",
        "PyYAML reads --config; it is imported inside the function that needs it",
    ),
    ("floor", "slime/gate/parallel.py", "judges the parts of a batch in Ray tasks"),
    *(
        ("local import", f"slime/{path}", reason)
        for path, reason in (
            ("accelerator/__init__.py", "the driver asks for the device and needs no torch for it"),
            ("backends/torch_engine/ray_actor.py", "the engine's process alone imports the engine"),
            ("accelerator/cpu.py", "imports megatron-core, which only a training process pays for"),
            ("prompts/dataset.py", "users' tests replace the module in sys.modules by then"),
            ("utils/arguments.py", "--help and a wrong flag are answered before numpy is imported"),
            ("utils/data.py", "prompts are read through this path where Ray is not loaded"),
            ("view/command.py", "a missing package is named before Starlette is imported"),
            (
                "utils/ppo_utils.py",
                "upstream's formulas are used where megatron-core is not loaded",
            ),
        )
    ),
    *(
        ("state", f"slime/{place}", reason)
        for place, reason in (
            ("accelerator/cpu_megatron.py::_patched_modules", "what is patched in this process"),
            ("accelerator/process_groups.py::_GLOO_GROUP", "torch's groups are the process's too"),
            ("backends/megatron_utils/log_prob_capture.py::_CAPTURED_LOG_PROBS", UPSTREAMS_STATE),
            ("config/derive.py::STEPS", REGISTRY),
            ("config/rules/registry.py::RULES", REGISTRY),
            ("data/columns.py::_said_singletons", WARNED_ONCE),
            ("data/declared_fields.py::_missed", WARNED_ONCE),
            ("data/weight_versions.py::_current_weight_version", UPSTREAMS_STATE),
            ("gate/alignment.py::_CODECS", "a cache by tokenizer, which it does not keep alive"),
            ("metrics/train_metrics.py::_said", WARNED_ONCE),
            ("plugins/failures.py::_said", WARNED_ONCE),
            ("prompts/chat_render.py::_ENCODES", "a cache of a property of templates"),
            ("prompts/template_limits.py::_problems", "a cache of a property of templates"),
            ("ray/actors.py::_is_local", "a process runs actors as objects or in Ray"),
            (
                "rollout/engine_client.py::_engines",
                "generate functions of users ask for the engines",
            ),
            ("rollout/engine_client.py::_last_warning", WARNED_ONCE),
            ("rollout/fully_async_rollout.py::_global_worker", UPSTREAMS_STATE),
            ("rollout/sample_hooks.py::_current_rollout_id", UPSTREAMS_STATE),
            ("tracking/phases.py::_phases", "any code of the process may begin a phase"),
            ("tracking/progress.py::_reporter", "any code of the process may report progress"),
            ("tracking/spans.py::_writer", "any code of the process may add a span"),
            ("tracking/tracking.py::_configured_logger", "logging is the process's"),
            ("tracking/tracking.py::_folders", "run folders that this process has opened"),
            ("tracking/tracking.py::_is_primary", "any code of the process may log"),
            ("tracking/tracking.py::_tracking", "any code of the process may log"),
            ("utils/async_utils.py::_loop", UPSTREAMS_STATE),
            ("utils/http_utils.py::_engine_origins", UPSTREAMS_STATE),
            ("utils/http_utils.py::_sessions", "an HTTP session belongs to one event loop"),
            ("utils/http_utils.py::_observer", "any code of the process may send requests"),
            ("utils/http_utils.py::_settings", UPSTREAMS_STATE),
        )
    ),
    (
        "parameters",
        "slime/backends/megatron_utils/forward.py::get_log_probs_and_entropy",
        "upstream's signature, pinned by its tests",
    ),
    *(
        (
            "parameters",
            f"slime/backends/megatron_utils/model.py::{name}",
            "upstream's parameters, and what is called before the first update",
        )
        for name in ("train", "train_one_step")
    ),
    (
        "parameters",
        "slime/prompts/dataset.py::__init__",
        "upstream's signature of Dataset, pinned by its tests",
    ),
    (
        "function size",
        "slime/backends/megatron_utils/loss.py::policy_loss_function",
        "upstream's tests read this function out of the file and run it alone",
    ),
    ("parameters", "slime/ray/actor_group.py::__init__", "upstream's signature of RayTrainGroup"),
    *(
        ("private name", f"slime/{path}", UPSTREAM_NAME)
        for path in (
            "backends/megatron_utils/hf_to_megatron/__init__.py",
            "backends/megatron_utils/loss.py",
            "ray/rollout.py",
            "rollout/engine_client.py",
        )
    ),
    *(
        ("hidden default", f"slime/{path}", SHORT_NAMESPACE)
        for path in (
            "rollout/engine_client.py",
            "rollout/group_selection.py",
            "rollout/rm_hub/__init__.py",
            "rollout/sample_hooks.py",
            "rollout/scoring.py",
            "rollout/sglang_rollout.py",
            "data/schedule.py",
            "prompts/eval_config.py",
            "data/flops.py",
            "utils/data.py",
            "utils/http_utils.py",
            "data/sample.py",
        )
    ),
)
