"""Every option has an effect: code outside slime/config reads it, Megatron gets it, or parsing acts
on it.

Code that only shows options (the dry run, the doctor) and code in slime/config (rules, derivations,
tables of upstream's flags) does not count: an option that is checked and derived from, and then
read by nothing, is accepted and not honoured.
"""

import ast
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

import slime
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.config.megatron import FIXED_ON_CPU, NOT_FLAGS
from slime.config.specs import all_specs
from slime.exceptions import ConfigError
from slime.observability.rollout_metrics import RolloutMetricsConfig
from slime.utils.arguments import parse_args

NUM_GPUS = 0

ROOT = Path(slime.__file__).parent
# Names under which code holds all options.
NAMESPACES = {"args", "_args", "given"}
# What these do with an option's value is to print it.
SHOWN_ONLY = ("config/", "dry_run.py", "doctor.py")
# Filled from the options by field name, whole: a field is read where code takes it from the config.
COPIED_BY_NAME = (LossConfig, RolloutMetricsConfig)
COPY_HOLDERS = {"config", "self"}
MEGATRON_CONFIGS = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
)

# Nothing but parsing looks at these: words that show it, and what it then says or derives.
ACTED_ON_AT_PARSING = {
    "critic_num_nodes": ("--advantage-estimator ppo --critic-num-nodes 2", "--critic-num-nodes 2"),
    "critic_num_gpus_per_node": (
        "--advantage-estimator ppo --critic-num-gpus-per-node 2",
        "--critic-num-gpus-per-node 2",
    ),
    "rollout_data_transport": (
        "--rollout-data-transport nixl",
        "--rollout-data-transport nixl is not built in",
    ),
    "log_probs_max_tokens_per_gpu": (
        "--max-tokens-per-gpu 64 --log-probs-max-tokens-per-gpu 128",
        "differs from --max-tokens-per-gpu 64",
    ),
    "use_checkpoint_opt_param_scheduler": (
        "--use-checkpoint-opt-param-scheduler --override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
    ),
    "use_rope_scaling": ("--use-rope-scaling", "--use-rope-scaling is True, but the model's"),
    "rope_scaling_factor": ("--rope-scaling-factor 8", "--rope-scaling-factor is 8.0, but the"),
    "train_backend": ("--train-backend fsdp", "--train-backend"),
    "offload": ("--offload", {"offload_train": True, "offload_rollout": True}),
    "dump_details": (
        "--dump-details dumps",
        {
            "save_debug_rollout_data": "dumps/rollout_data/{rollout_id}.parquet",
            "save_debug_train_data": "dumps/train_data/{rollout_id}.parquet",
        },
    ),
    "custom_config_path": ("--custom-config-path {lr}", {"lr": 0.25}),
}


def _last_name(node):
    return getattr(node, "id", getattr(node, "attr", None))


def _is_namespace(node):
    """`args`, `self.args`, `given`, `vars(args)`."""
    if isinstance(node, ast.Call) and _last_name(node.func) == "vars":
        return any(_is_namespace(argument) for argument in node.args)
    return _last_name(node) in NAMESPACES


def _text(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _read_by(node):
    """The names of options that one node of code reads by writing them down, and whether it reads
    one by a name that it computes.
    """
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and _is_namespace(node.value)
    ):
        return {node.attr}, False
    if (
        isinstance(node, ast.Attribute)
        and _last_name(getattr(node.value, "func", None)) == "from_args"
    ):
        return {node.attr}, False  # SomeConfig.from_args(args).x
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and _is_namespace(node.value)
    ):
        return {_text(node.slice)}, _text(node.slice) is None
    if (
        isinstance(node, ast.Call)
        and _last_name(node.func) == "getattr"
        and _is_namespace(node.args[0])
    ):
        return {_text(node.args[1])}, _text(node.args[1]) is None
    if (
        isinstance(node, ast.Call)
        and _last_name(node.func) == "get"
        and _is_namespace(getattr(node.func, "value", None))
    ):
        return {_text(node.args[0])}, _text(node.args[0]) is None
    return set(), False


def names_in(source):
    """The options that code reads: written at the place, or in a table of the same file where a
    place reads by a computed name.
    """
    tree = ast.parse(source)
    found = [_read_by(node) for node in ast.walk(tree)]
    names = set().union(*(written for written, _ in found))
    if any(is_computed for _, is_computed in found):
        for table in (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
        ):
            elements = [*table.keys, *table.values] if isinstance(table, ast.Dict) else table.elts
            names.update(filter(None, map(_text, elements)))
    return names - {None}


def names_that_code_reads():
    """Of all code but that which only shows or checks options."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in ROOT.rglob("*.py")
    }
    read = set().union(
        *(names_in(source) for path, source in sources.items() if not path.startswith(SHOWN_ONLY))
    )
    for config_class in COPIED_BY_NAME:
        users = [source for source in sources.values() if config_class.__name__ in source]
        attributes = [
            node
            for source in users
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
        ]
        taken = {
            node.attr
            for node in attributes
            if _last_name(node.value) in COPY_HOLDERS and isinstance(node.ctx, ast.Load)
        }
        read |= taken & set(config_class.__dataclass_fields__)
    return read


def names_that_megatron_gets():
    """The fields of the config classes that are filled from the options whole."""
    return {
        name
        for module, config_class in MEGATRON_CONFIGS
        for name in getattr(importlib.import_module(module), config_class).__dataclass_fields__
    }


def test_every_declared_option_is_read_by_code():
    """Every declared option is read by code or passed to Megatron."""
    found = names_that_code_reads() | names_that_megatron_gets()
    unread = {spec.name for spec in all_specs()} - found
    assert sorted(unread - set(ACTED_ON_AT_PARSING)) == []
    assert sorted(set(ACTED_ON_AT_PARSING) - unread) == [], "code reads these: no need to list them"


@pytest.mark.parametrize("name", sorted(ACTED_ON_AT_PARSING))
def test_what_only_parsing_looks_at_is_acted_on_there(tmp_path, name):
    """An option that only parsing reads is refused there or turned into one that code reads."""
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
        ("LossConfig.from_args(args).lr", True),
        ('vars(args).get("lr")', True),
        ('vars(self.args)["lr"]', True),
        ('getattr(args, "lr", 0)', True),
        ('for name in ("lr", "min_lr"): print(getattr(args, name))', True),
        ('RATES = {"rate": "lr"}\ndef rate(args, name): return getattr(args, RATES[name])', True),
        ("scheduler.lr", False),
        ("self.lr", False),
        ("args.lr = 1", False),
        ('given["lr"] = 1', False),
        ("lr = 1", False),
        ('NAMES = ("lr",)', False),
        ('print("lr")', False),
        ('"""lr"""', False),
        ("# args.lr", False),
    ],
)
def test_the_search_is_for_options_and_not_for_words(source, is_read):
    """The search counts reads of options, and not attributes or texts of the same name or
    assignments."""
    assert ("lr" in names_in(source)) is is_read


def test_megatrons_fields_are_not_overwritten_behind_an_option(tmp_path):
    """An option that Megatron gets another value for than was given is not honoured: its name is no
    flag, or its value is refused.
    """
    from slime.backends.megatron_utils.model_provider import _derived_fields

    args = parse_args([*write_run_inputs(tmp_path), "--accelerator", "cpu"])
    megatron = {spec.name for spec in all_specs() if spec.source == "megatron"}
    overwritten = set(_derived_fields(args, vars(args))) & (megatron | set(NOT_FLAGS))
    assert overwritten - set(NOT_FLAGS) == set(FIXED_ON_CPU)


@pytest.mark.parametrize("name", sorted(FIXED_ON_CPU))
def test_what_a_cpu_machine_cannot_do_is_refused(tmp_path, name):
    """It was accepted and counted as honoured, and the model was built without it. What the machine
    does anyway may be said.
    """
    flag, words = (
        f"--{name.replace('_', '-')}",
        [*write_run_inputs(tmp_path), "--accelerator", "cpu"],
    )
    asked, fixed = (
        ([flag], [f"--no-{flag[2:]}"])
        if FIXED_ON_CPU[name] is False
        else ([flag, "transformer_engine"], [flag, "local"])
    )
    with pytest.raises(
        ConfigError, match=f"{flag} .*needs CUDA, and training runs on the CPU.*Leave it out"
    ):
        parse_args([*words, *asked])
    assert getattr(parse_args([*words, *fixed]), name) == FIXED_ON_CPU[name]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
