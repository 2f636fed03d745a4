"""Every option of slime: one dataclass per concern, one field per option; no torch, no Ray.

Nothing here imports more than the standard library, so `slime train --no-such-flag` answers before
torch could be imported. `slime.config.specs` turns the dataclasses into a flat list; `cli` makes
the command line from it, `yaml_file` the `--config` file, `rules` and `derive` what holds between
options, `compat` what upstream flags mean here.
"""

# The order is the order of the groups in `--help` and in docs/flags.md.
CONCERNS = (
    "cluster",
    "data",
    "rollout",
    "engine",
    "reward",
    "gate",
    "evaluation",
    "batching",
    "algorithm",
    "checkpoint",
    "observability",
    "recording",
    "debug",
    "megatron",
)
