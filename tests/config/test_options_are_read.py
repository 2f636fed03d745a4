"""Every option changes something: code outside slime/config reads it, Megatron gets it, or parsing itself acts on it."""

import ast
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

import slime
from slime.config.specs import all_specs
from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args

NUM_GPUS = 0

# Names under which code holds the options or a frozen part of them.
HOLDERS = {"args", "config", "options", "given", "self", "cls"}
MEGATRON_CONFIGS = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
)

# Nothing but parsing looks at these: words that show it, and what it then says or derives.
ACTED_ON_AT_PARSING = {
    "critic_num_nodes": ("--advantage-estimator ppo --critic-num-nodes 2", "--critic-num-nodes 2"),
    "critic_num_gpus_per_node": ("--advantage-estimator ppo --critic-num-gpus-per-node 2", "--critic-num-gpus-per-node 2"),
    "rollout_data_transport": ("--rollout-data-transport nixl", "--rollout-data-transport nixl is not built in"),
    "log_probs_max_tokens_per_gpu": ("--max-tokens-per-gpu 64 --log-probs-max-tokens-per-gpu 128", "differs from --max-tokens-per-gpu 64"),
    "use_checkpoint_opt_param_scheduler": (
        "--use-checkpoint-opt-param-scheduler --override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
    ),
    "train_backend": ("--train-backend fsdp", "--train-backend"),
    "offload": ("--offload", {"offload_train": True, "offload_rollout": True}),
    "custom_config_path": ("--custom-config-path {lr}", {"lr": 0.25}),
}


def names_in(source):
    """Attributes of what holds options (also `SomeConfig.from_args(args).x`), and string constants (`given.get("x")`, tables of names)."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            made = isinstance(owner, ast.Call) and getattr(owner.func, "attr", None) == "from_args"
            if made or getattr(owner, "id", getattr(owner, "attr", None)) in HOLDERS:
                names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def names_that_code_reads():
    """Of all code but slime/config."""
    root = Path(slime.__file__).parent
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != "config"]
    return set().union(*(names_in(path.read_text(encoding="utf-8")) for path in files))


def names_that_megatron_gets():
    """The fields of the config classes that are filled from the options whole."""
    return {
        name
        for module, config_class in MEGATRON_CONFIGS
        for name in getattr(importlib.import_module(module), config_class).__dataclass_fields__
    }


def test_every_declared_option_is_read_by_code():
    """Declared and accepted is not honoured: a script would run with another meaning than it says."""
    found = names_that_code_reads() | names_that_megatron_gets()
    unread = {spec.name for spec in all_specs()} - found
    assert sorted(unread - set(ACTED_ON_AT_PARSING)) == []
    assert sorted(set(ACTED_ON_AT_PARSING) - unread) == [], "code reads these: no need to list them"


@pytest.mark.parametrize("name", sorted(ACTED_ON_AT_PARSING))
def test_what_only_parsing_looks_at_is_acted_on_there(tmp_path, name):
    """Refused with its flag, or turned into what code reads."""
    words, outcome = ACTED_ON_AT_PARSING[name]
    (tmp_path / "own.yaml").write_text("lr: 0.25\n")
    line = [*write_run_inputs(tmp_path), *words.format(lr=tmp_path / "own.yaml").split()]
    if isinstance(outcome, str):
        with pytest.raises(ConfigError) as caught:
            parse_args(line)
        assert outcome in str(caught.value)
        return
    without, args = parse_args(write_run_inputs(tmp_path / "b")), parse_args(line)
    for changed, value in outcome.items():
        assert getattr(args, changed) == value != getattr(without, changed)


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("self.args.lr", True),
        ("config.lr", True),
        ("LossConfig.from_args(args).lr", True),
        ('vars(args).get("lr")', True),
        ("scheduler.lr", False),
        ("args.lr = 1", False),
        ("lr = 1", False),
    ],
)
def test_the_search_is_for_options_and_not_for_words(source, is_read):
    """Else any attribute of the same name would do, and so would an assignment."""
    assert ("lr" in names_in(source)) is is_read


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
