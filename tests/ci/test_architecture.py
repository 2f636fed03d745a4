"""docs/architecture.md: the picture is what the code says, first lines are kept, and every answer to
"where do I change" is tried from a module outside slime, or found where the page names it.
"""

import ast
import asyncio
import dataclasses
import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import draw_house
import generate_docs
import pytest
import torch
from repo_shape import bound_names, imported_modules, runtime_nodes
from support.loss_cases import make_logits, make_samples, mask_sums_of, pack
from support.model_features import CONFIGS
from support.options import write_run_inputs
from support.pretend_rank import pretend_rank

from slime.algorithms.table import ESTIMATORS, Estimator
from slime.backends.megatron_utils import loss
from slime.config import debug
from slime.config.option import option
from slime.config.specs import all_specs, specs_by_name
from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.fields import CONTRACT
from slime.data.ledger import ledger_of_rollout
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.metrics.batch_values import phase_contributions
from slime.metrics.contributions import merge_all
from slime.metrics.rollout_metrics import log_rollout_data
from slime.models import param_mapping, shape
from slime.models.families import FAMILIES, Family
from slime.rollout.group_selection import GroupSelection
from slime.rollout.rm_hub import async_rm
from slime.testing import make_sample
from slime.tracking.tracking import Tracking
from slime.utils.arguments import parse_args

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
THINGS = "field, metric, reward, reason, estimator, option, model family, filter, sink".split(", ")

PLUG_IN = """
import torch
from slime.data.fields import Reduce, declare_field
from slime.metrics.contributions import maximum
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

declare_field("answer_length", source="metadata.answer_length", wire_dtype="int32", reduce=Reduce.MAX)
LOGGED = []


async def reward(args, sample):
    return args.reward_of_a_letter * len(sample.response)


def keep_mixed(args, samples):
    keep = len({sample.reward for sample in samples}) > 1
    return DynamicFilterOutput(keep=keep, reason=None if keep else "all_equal")


def advantages(args, rollout_data):
    given = zip(rollout_data["rewards"], rollout_data["loss_masks"])
    rollout_data["advantages"] = [3 * reward * torch.ones(len(mask)) for reward, mask in given]
    rollout_data["returns"] = rollout_data["advantages"]


def loss(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {"largest_logit": maximum(logits.detach().flatten().numpy())}


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    LOGGED.append((rollout_id, len(samples)))
    return True
"""


def rows_of_the_table():
    """{what: (from outside, inside)} of the page."""
    rows = re.findall(r"^\| ([a-z ]+) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    return {what: cells for what, *cells in rows if what != "what"}


# --- the picture and the first lines --------------------------------------------------------------


def test_the_picture_is_that_of_the_code(capsys):
    """A module, an import or a floor that changes makes the picture stale."""
    assert generate_docs.main(["architecture.svg", "--check"]) == 0, capsys.readouterr().err
    assert "](architecture.svg)" in PAGE


def test_a_new_import_and_another_first_line_change_the_picture():
    """The picture has one square per folder and imported folder, and the first line as it is."""
    trees = {
        "slime.gate": ast.parse('"""Judges."""'),
        "slime.gate.judge": ast.parse("import torch"),
        "slime.data.sample": ast.parse(""),
        "slime.data": ast.parse('"""Samples, not words.\n\nMore."""'),
    }
    before = draw_house.draw(trees)
    assert ">Samples, not words.<" in before and "More" not in before
    square = f"height='11' fill='{draw_house.COLORS['import']}'"
    assert before.count(square) == 1  # the legend's
    trees["slime.gate.judge"] = ast.parse("from slime.data.sample import Sample")
    after = draw_house.draw(trees)
    assert after.count(square) == 2
    assert after.index(">gate<") < after.index(">data<")  # the gate stands above


PACKAGES = sorted(path.parent for path in (ROOT / "slime").rglob("__init__.py"))
# Words of a first line -> the packages that no module of the folder may import then.
ABSENT = {
    "no Ray": ("ray",),
    "no Megatron": ("megatron",),
    "no torch": ("torch",),
    "no HTTP": ("aiohttp", "requests", "httpx", "urllib3"),
}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_says_in_its_first_line_what_it_does_and_what_it_may_not(folder):
    """The line is whole sentences, and "no Ray", "no torch" and the like hold for every module."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    line = draw_house.first_line(tree)
    assert line.endswith(".") and re.search(r"\b(no|not|nothing|only|never|by itself)\b", line), (
        line
    )
    forbidden = {name for words, names in ABSENT.items() if words in line for name in names}
    for path in folder.rglob("*.py"):
        for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            tops = {name.split(".")[0] for name in imported_modules(node)}
            assert not tops & forbidden, (path, tops & forbidden)


def test_the_rooms_import_no_door():
    """A door is for upstream's callers; code of slime imports the room that it leads to."""
    trees = draw_house.read_modules()
    doors = {
        module
        for module, tree in trees.items()
        if any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sys.modules[__name__]"
            for node in tree.body
        )
    }
    graph = draw_house.import_graph(trees)
    assert len(doors) > 20
    assert {
        (module, door) for module in set(graph) - doors for door in graph[module] & doors
    } == set()


# --- where do I change ----------------------------------------------------------------------------


def test_the_table_names_at_most_three_files_that_hold_what_it_says():
    """Every file is there and defines, or is, what the page names in it; every option exists."""
    rows = rows_of_the_table()
    assert list(rows) == THINGS
    for what, (outside, inside) in rows.items():
        named = re.findall(r"`(slime/[\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", inside)
        assert named and len({file for file, _ in named}) <= 3, what
        assert len(named) == len(re.findall(r"`slime/", inside)), (
            f"{what}: a file without its table"
        )
        for file, names in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert set(re.findall(r"\w+", names)) <= bound_names(tree), (what, file, names)
        for flag in re.findall(r"`--([a-z-]+)`", outside):
            assert flag.replace("-", "_") in specs_by_name(), flag
    for link in re.findall(r"\]\(([\w.]+)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
    for file in re.findall(r"`((?:slime|tools)/[\w/]+\.py)`", PAGE):
        assert (ROOT / file).is_file(), file


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    """The options of a run whose functions stand in a module outside slime."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "house_plug_in.py").write_text(PLUG_IN)
    (folder / "own.yaml").write_text("reward_of_a_letter: 0.5\n")
    words = ["--custom-config-path", str(folder / "own.yaml"), "--loss-type", "custom_loss"]
    for flag, function in (
        ("--custom-rm-path", "reward"),
        ("--dynamic-sampling-filter-path", "keep_mixed"),
        ("--custom-advantage-function-path", "advantages"),
        ("--custom-loss-function-path", "loss"),
        ("--custom-rollout-log-function-path", "log"),
    ):
        words += [flag, f"house_plug_in.{function}"]
    sys.path.insert(0, str(folder))
    try:
        yield parse_args([*write_run_inputs(folder), *words])
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("house_plug_in", None)
        CONTRACT.remove("answer_length")


def test_a_field_declared_outside_arrives_on_the_ranks_and_is_a_metric(args):
    """Eight samples with answers of 0 to 7 letters on two ranks: each rank has its own values, and
    the metric is the largest, 7."""
    samples = [
        make_sample(
            "q", "ab", index=i, group_index=i // 2, reward=i % 2, metadata={"answer_length": i}
        )
        for i in range(8)
    ]
    config = ColumnsConfig.from_args(args)
    raw, rewards, _ = compute_rewards(samples, config)
    columns = build_train_columns(samples, (raw, rewards), config)
    schedule = ScheduleConfig(dp_size=2, align=2, token_cap=32, packing="balanced")
    split = split_by_dp(
        columns, SplitConfig(global_batch_size=8, expected_rollouts=8, schedule=schedule)
    )
    batches = [localize(shard, rank) for rank, shard in enumerate(split.shards)]
    arrived = [list(batch["answer_length"]) for batch in batches]
    assert sorted(sum(arrived, [])) == list(range(8)) and all(map(len, arrived))
    assert merge_all([phase_contributions(batch) for batch in batches])["answer_length"] == 7


def test_a_reward_outside_scores_with_an_option_of_its_own(args):
    """Half a point a letter: the factor is a key of --custom-config-path."""
    assert args.reward_of_a_letter == 0.5
    assert asyncio.run(async_rm(args, make_sample("q", "abc"))) == 1.5


def test_a_filter_outside_drops_a_group_and_its_reason_is_in_the_ledger(args):
    """Of two groups of two the one with equal rewards goes, counted under the filter's reason."""
    groups = [
        [make_sample("q", "a", index=i, reward=reward) for i, reward in enumerate(rewards)]
        for rewards in ((0.0, 1.0), (1.0, 1.0))
    ]
    selection = GroupSelection(args, rollout_id=0)
    verdicts = [selection.verdict_against(group, remaining=9, num_kept=0) for group in groups]
    assert verdicts[0] is None
    selection.drop_filtered(verdicts[1], groups[1])
    ledger = ledger_of_rollout(
        [None, None],
        [0, 1],
        trains=[True, True],
        num_trained=2,
        dropped_by_split={},
        dropped_before=selection.dropped,
    ).plan_metrics()
    assert ledger["rollout/ledger/dropped/dynamic_filter_all_equal"] == 2


def test_advantages_outside_are_those_of_the_trainer(args):
    """Three times the reward at every token, in place of the estimator's."""
    data = {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.ones(3), torch.ones(2)],
        "log_probs": [torch.zeros(3), torch.zeros(2)],
        "rewards": [1.0, -2.0],
    }
    with pretend_rank():
        loss.compute_advantages_and_returns(args, data)
    assert [one.tolist() for one in data["advantages"]] == [[3.0] * 3, [-6.0] * 2]


def test_a_loss_outside_reports_a_metric_with_its_own_reduction(args):
    """The largest logit of two micro-batches is the larger one of both."""
    reports, largest = [], []
    for seed in (3, 4):
        samples = make_samples([(2, 4), (1, 3)], seed)
        for sample in samples:
            sample.loss_mask = [1] * sample.response_length
        advantages = [[1.0] * sample.response_length for sample in samples]
        logits = [seed * one for one in make_logits(samples, seed)]
        batch, packed = pack(samples, logits, advantages, mask_sums_of(samples))
        with pretend_rank():
            reports.append(loss.loss_function(args, batch, 1, 2, packed)[2]["contributions"])
        largest.append(packed.max().item())
    assert largest[0] != largest[1]
    assert merge_all(reports)["largest_logit"] == pytest.approx(max(largest))


def test_a_log_function_outside_gets_every_rollout(args):
    """It is a sink for samples and numbers, and where it returns True the only one."""
    samples = [make_sample("q", "a", reward=1.0)]
    assert log_rollout_data(7, args, samples, {}, 1.0) is None
    assert importlib.import_module("house_plug_in").LOGGED == [(7, 1)]


def test_one_entry_adds_a_model_family(monkeypatch):
    """Its config.json is read, and its weights have the names of its entry."""
    entry = Family("mine", ("MineForCausalLM",), qk_norm=True)
    for module in (shape, param_mapping):
        monkeypatch.setattr(module, "FAMILIES", {**FAMILIES, "mine": entry})
    found = shape.model_shape({**CONFIGS["qwen3"], "model_type": "mine"})
    assert found.family is entry and found.qk_norm
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    assert param_mapping.match("mine", name).hf_names == ("model.layers.1.self_attn.q_norm.weight",)


def test_one_entry_adds_an_estimator(monkeypatch, tmp_path):
    """It can be chosen, and the critic follows from its entry."""
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(None, needs_critic=True))
    args = parse_args([*write_run_inputs(tmp_path), "--advantage-estimator", "mine"])
    assert args.advantage_estimator == "mine" and args.use_critic


def test_one_field_of_a_concern_adds_an_option(monkeypatch, tmp_path):
    """A dataclass field of slime/config/debug.py is a flag with its range."""
    own = dataclasses.make_dataclass(
        "Own", [("own_number", int, option(1, "A number.", minimum=1))], frozen=True
    )
    own.__module__, own.__doc__ = debug.__name__, "Own"
    monkeypatch.setattr(debug, "Own", own, raising=False)
    caches = (all_specs, specs_by_name)
    for cache in caches:
        cache.cache_clear()
    try:
        args = parse_args([*write_run_inputs(tmp_path), "--own-number", "5"])
        assert args.own_number == 5
    finally:
        for cache in caches:
            cache.cache_clear()


def test_a_class_with_two_methods_is_a_sink(tmp_path):
    """It gets every record of the run, in the process that feeds trackers."""

    class Own:
        name = "own"

        def __init__(self):
            self.seen = []

        def write(self, metrics, step_key):
            self.seen.append((metrics, step_key))

        def close(self):
            self.seen.append("closed")

    sink = Own()
    tracking = Tracking(str(tmp_path), [sink])
    tracking.log({"train/step": 1, "train/loss": 0.5}, "train/step")
    tracking.close()
    assert sink.seen == [({"train/step": 1, "train/loss": 0.5}, "train/step"), "closed"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
