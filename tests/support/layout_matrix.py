"""The layout matrix: which layouts, which algorithms, how a cell is run and what its numbers are
compared with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from support.distributed import run_distributed
from support.layout_batch import ROWS, TEMPLATE, make_folders, read_records, values_of
from support.layout_cell import FULL_FIELDS, RankResult, owned_places, run_cells
from support.layout_reference import Expected, critic_reference_of, reference_of

from slime.data.fields import GRADIENT_LAYOUT_TOLERANCE, LAYOUT_TOLERANCE

VALUE_TOLERANCE, GRADIENT_TOLERANCE = LAYOUT_TOLERANCE, GRADIENT_LAYOUT_TOLERANCE

TP2, PP2, CP2 = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)
EP2, SP = {"expert_model_parallel_size": 2}, {"sequence_parallel": True}
VPP2 = {"num_layers_per_virtual_pipeline_stage": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TRAILING = {"keep_trailing_rollouts": True}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A number of processes, options, and the model family."""

    ranks: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    family: str = "qwen3"


LAYOUTS = {
    "dp1": Layout(1),
    "dp1 trailing": Layout(1, TRAILING),
    "dp1 dynamic": Layout(1, DYNAMIC),
    "dp1 recompute": Layout(1, RECOMPUTE | {"recompute_loss_function": True}),
    "dp2": Layout(2),
    "dp2 dynamic": Layout(2, DYNAMIC),
    "dp2 distributed-optimizer": Layout(2, DISTRIBUTED),
    "tp2": Layout(2, TP2),
    "tp2 sp": Layout(2, TP2 | SP),
    "pp2": Layout(2, PP2),
    "pp2 uneven": Layout(2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "pp2 vpp2": Layout(2, PP2 | VPP2),
    "cp2": Layout(2, CP2),
    "cp2 dynamic recompute": Layout(2, CP2 | DYNAMIC | RECOMPUTE),
    "dp4 idle-ranks": Layout(4, TRAILING),
    "cp2 tp2": Layout(4, CP2 | TP2 | SP | DISTRIBUTED),
    "pp2 cp2": Layout(4, PP2 | CP2),
    "tp2 dp2": Layout(4, TP2 | DYNAMIC),
    "cp2 dp2": Layout(4, CP2 | TRAILING | DISTRIBUTED),
    "moe dp1": Layout(1, family="qwen3_moe"),
    "moe ep2": Layout(2, EP2, family="qwen3_moe"),
    "moe tp2 sp ep2": Layout(4, TP2 | SP | EP2, family="qwen3_moe"),
    "moe ep2 dp2": Layout(4, EP2 | DISTRIBUTED, family="qwen3_moe"),
    "moe pp2 ep2": Layout(4, PP2 | EP2, family="qwen3_moe"),
}

WHITENED = {"normalize_advantages": True}
OPD = {"use_opd": True, "opd_kl_coef": 0.2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.06},
    "cispo": {"advantage_estimator": "cispo", "eps_clip_high": 0.28, "rollout_temperature": 0.8},
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k2"},
    "ppo critic": {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "value_clip": 0.01},
    "ppo whitened": {"advantage_estimator": "ppo", "lambd": 0.9, "eps_clip_c": 3.0} | WHITENED,
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1} | WHITENED,
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1} | WHITENED,
    "rloo": {"advantage_estimator": "rloo"},
    "dr_grpo": {"advantage_estimator": "dr_grpo"},
    "opd": OPD | {"opd_type": "sglang"},
    "opd teacher model": OPD | {"opd_type": "megatron"},
    "kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
    "unbiased kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.95},
    "opsm": {"use_opsm": True, "opsm_delta": 1e-3},
    "engine log-probs": {"use_rollout_logprobs": True},
    "per-token loss": {"calculate_per_token_loss": True, "use_kl_loss": True, "kl_loss_coef": 0.05},
    "entropy bonus": {"entropy_coef": 0.02, "use_rollout_entropy": True, "log_probs_chunk_size": 5},
    "all together": {
        "use_tis": True, "use_opsm": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coef": 0.01,
        "rollout_temperature": 0.7, "calculate_per_token_loss": True, "eps_clip_c": 2.0,
    } | WHITENED,
}  # fmt: skip

CRITIC = "ppo critic"  # trains the value model, from values that it computes itself

COMMON: dict[str, Any] = {
    "rollout_batch_size": 6, "n_samples_per_prompt": 2, "global_batch_size": 6, "num_rollout": 1, "micro_batch_size": 2,
    "rollout_max_response_len": 16, "lr": 1e-2, "lr_decay_style": "constant", "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_eps": 1e-2, "data_pad_size_multiplier": 8, "make_vocab_size_divisible_by": 16, "log_passrate": True,
    "log_multi_turn": True, "log_correct_samples": True, "num_cpus": 4, "accelerator": "cpu", "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "logprob_diff_alarm": 100.0, "distributed_timeout_minutes": 2, "load_debug_rollout_data": TEMPLATE,
}  # fmt: skip


def algorithm_options(algorithm: str, layout: str) -> dict[str, Any]:
    """Command-line options of a cell that the reference knows too: all but the parallel ones."""
    return (
        COMMON
        | ALGORITHMS[algorithm]
        | {k: v for k, v in LAYOUTS[layout].options.items() if k in TRAILING}
    )


def command_line(algorithm: str, layout: str, folders: dict[str, Path], run_dir: Path) -> list[str]:
    """The options of a cell as words, for slime's own parser."""
    chosen = LAYOUTS[layout]
    model, ref = folders[chosen.family], folders[f"{chosen.family}-ref"]
    options = algorithm_options(algorithm, layout) | chosen.options
    options |= {
        "hf_checkpoint": model,
        "load": model,
        "critic_load": model,
        "ref_load": ref,
        "actor_num_gpus_per_node": chosen.ranks,
        "run_dir": run_dir,
    }
    if options.get("opd_type") == "megatron":
        options["opd_teacher_load"] = ref
    if chosen.family == "qwen3_moe":
        options["moe_aux_loss_coeff"] = 0.0
    words = []
    for name, value in options.items():
        words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return words


@dataclasses.dataclass
class Cell:
    """A cell's largest relative differences from the reference, and what differed most. `failure`:
    why it has none, or which is too large.
    """

    layout: str
    algorithm: str
    value_difference: float = 0.0
    gradient_difference: float = 0.0
    worst: str = ""
    failure: str = ""

    @property
    def difference(self) -> float:
        return max(self.value_difference, self.gradient_difference)


class Matrix:
    """Runs layouts in `root` and compares them; references are computed once per family, algorithm
    and batch.

    A one-process layout that has run is also what the others' metrics are compared with, those that
    the reference has no number for included.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        families = tuple(sorted({layout.family for layout in LAYOUTS.values()}))
        self.folders = make_folders(root / "models", families)
        self.records = read_records()
        self._expected: dict[tuple, Expected] = {}
        self._single: dict[tuple, dict[str, list]] = {}
        self._runs = 0

    def expected(self, layout: str, algorithm: str) -> Expected:
        """The reference's numbers for a cell."""
        key, options = batch_key(layout, algorithm), algorithm_options(algorithm, layout)
        if key not in self._expected:
            models = {"policy": self.folders[key[0]], "ref": self.folders[f"{key[0]}-ref"]}
            values = [values_of(index) for index in range(len(ROWS))]
            if algorithm == CRITIC:
                self._expected[key] = critic_reference_of(self.records, models["policy"], options)
            else:
                self._expected[key] = reference_of(self.records, models, options, values)
        return self._expected[key]

    def run(
        self, layouts: Iterable[str], algorithms: Iterable[str], *, timeout: float
    ) -> list[Cell]:
        """The compared cells of layouts with one number of ranks, in one set of processes. Their
        failure is every cell's failure.
        """
        from slime.utils.arguments import parse_args

        cells, arguments = [(layout, name) for layout in layouts for name in algorithms], []
        (ranks,) = {LAYOUTS[layout].ranks for layout, _ in cells}
        folders = {}
        for layout, name in cells:
            self._runs += 1
            folder = folders[layout, name] = self.root / "runs" / str(self._runs)
            folder.mkdir(parents=True)
            args = parse_args(command_line(name, layout, self.folders, folder))
            arguments.append(((layout, name), "critic" if name == CRITIC else "actor", args))
        try:
            by_rank = run_distributed(run_cells, ranks, arguments, timeout=timeout)
        except AssertionError as error:
            return [Cell(*cell, failure=str(error)) for cell in cells]
        return [
            self._compared(cell, [results[cell] for results in by_rank], folders[cell])
            for cell in cells
        ]

    def _compared(self, cell: tuple[str, str], by_rank: list[RankResult], folder: Path) -> Cell:
        metrics, key = read_metrics(folder), batch_key(*cell)
        if len(by_rank) == 1:
            self._single.setdefault(key, metrics)
        return Comparison(self.expected(*cell), by_rank, metrics, self._single.get(key)).cell(*cell)


def batch_key(layout: str, algorithm: str) -> tuple[str, str, bool]:
    """What decides which numbers are right: the model, the algorithm, and whether the last rollouts
    make a step.
    """
    return LAYOUTS[layout].family, algorithm, "keep_trailing_rollouts" in LAYOUTS[layout].options


def read_metrics(folder: Path) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """{step key: [(step, metrics)] in order} of a run folder."""
    result: dict[str, list] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "step_key" in record:
            result.setdefault(record["step_key"], []).append((record["step"], record["metrics"]))
    return result


def gather_field(by_rank: list[RankResult], name: str) -> dict[int, torch.Tensor | str]:
    """{position: all response tokens, fp64} of a field; text instead where the ranks that have a
    token disagree, or none has it.
    """
    result: dict[int, Any] = {}
    for rank in by_rank:
        for position, values in zip(
            rank.positions, rank.fields.get(name, []), strict=name in rank.fields
        ):
            row = ROWS[position]
            whole = result.setdefault(
                position, torch.full((row.response,), torch.nan, dtype=torch.float64)
            )
            places = owned_places(
                row.prompt + row.response, row.response, cp_size=rank.cp_size, cp_rank=rank.cp_rank
            )
            places = list(range(row.response)) if name in FULL_FIELDS else places
            if len(places) != values.numel():
                result[position] = f"{values.numel()} values for {len(places)} tokens"
                continue
            known, values = whole[places], values.double().reshape(-1)
            if bool((~known.isnan() & (known != values)).any()):
                result[position] = "ranks that hold the same token disagree"
                continue
            whole[places] = values
    return result


# Sums whose terms are differences of log-probs (nats), or advantages of both signs: they may
# vanish, so they are compared on the scale of one.
CANCELLING = (
    "loss pg_loss ppo_kl kl kl_loss opd_reverse_kl advantages returns values rewards raw_reward "
    "logprob_kl/k1 logprob_kl/k3 pg_clipfrac "
    "train_rollout_logprob_abs_diff tis_abs opsm_clipfrac tis_clipfrac logprob_abs_diff logprob_kl log_probs ref_log_probs"
).split()
TIMES = ("perf/", "schedule/", "gate/time/")
# Megatron's optimizer has a parameter group more where experts are spread over ranks.
GROUPS = ("train/lr-pg_", "train/critic-lr-pg_")


def _cancels(name: str) -> bool:
    return name in CANCELLING or name.partition("/")[0] in CANCELLING


def named_metrics(metrics: dict[str, list]) -> dict[str, float]:
    """{"<step> <metric>": value} of a run folder's metrics that a layout must not change."""
    return {
        f"{step} {name}": value
        for records in metrics.values()
        for step, values in records
        for name, value in values.items()
        if not name.startswith((*TIMES, *GROUPS))
    }


def relative(actual: float, expected: float, *, scale: float = 0.0) -> float:
    """|actual - expected| over the larger of |expected| and `scale`."""
    if actual == expected:
        return 0.0
    return abs(actual - expected) / max(abs(expected), scale, 1e-12)


def tensor_difference(actual: torch.Tensor, expected: torch.Tensor, *, scale: float = 0.0) -> float:
    """The largest |actual - expected| over the largest |expected|, or `scale` if that is more."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    difference = float((actual.double() - expected.double()).abs().max())
    return (
        relative(difference, 0.0, scale=max(scale, float(expected.abs().max())))
        if difference == difference
        else float("inf")
    )


class Comparison:
    """One cell's results against what is expected."""

    def __init__(
        self, expected: Expected, by_rank: list[RankResult], metrics: dict, single: dict | None
    ) -> None:
        self.expected, self.by_rank, self.metrics, self.single = expected, by_rank, metrics, single
        self.values: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.problems: list[str] = []

    def cell(self, layout: str, algorithm: str) -> Cell:
        for part in (
            self._fields,
            self._steps,
            self._phase,
            self._rollout_side,
            self._one_process,
            self._tensors,
            self._replicas,
        ):
            part()
        self.problems += [
            f"{name} differs by {d:.2e}"
            for name, d in self.values.items()
            if not d <= VALUE_TOLERANCE
        ]
        self.problems += [
            f"{name} differs by {d:.2e}"
            for name, d in self.gradients.items()
            if not d <= GRADIENT_TOLERANCE
        ]
        everything = self.values | self.gradients
        worst = max(everything, key=everything.__getitem__)
        largest = max(self.values.values()), max(self.gradients.values())
        return Cell(layout, algorithm, *largest, worst, "; ".join(self.problems))

    def _fields(self) -> None:
        for name, rows in self.expected.fields.items():
            if name in ("rewards", "response_lengths", "total_lengths"):
                found = {
                    p: float(v)
                    for r in self.by_rank
                    for p, v in zip(r.positions, r.fields.get(name, []), strict=name in r.fields)
                }
                if sorted(found) != sorted(rows):
                    self.problems.append(
                        f"{name}: samples {sorted(found)}, expected {sorted(rows)}"
                    )
                self.values[f"field {name}"] = max(
                    relative(found[p], rows[p], scale=1.0) for p in found
                )
                continue
            found = gather_field(self.by_rank, name)
            if sorted(found) != sorted(rows):
                self.problems.append(f"{name}: samples {sorted(found)}, expected {sorted(rows)}")
                continue
            differences = [0.0]
            for position, values in found.items():
                if isinstance(values, str):
                    self.problems.append(f"{name} of sample {position}: {values}")
                    continue
                differences.append(
                    tensor_difference(
                        values, torch.tensor(rows[position], dtype=torch.float64), scale=1.0
                    )
                )
            self.values[f"field {name}"] = max(differences)

    def _steps(self) -> None:
        logged = self.metrics.get("train/step", [])
        if [step for step, _ in logged] != list(range(len(self.expected.steps))):
            self.problems.append(
                f"steps {[step for step, _ in logged]} were logged, expected "
                f"{len(self.expected.steps)}"
            )
            return
        for (step, actual), expected in zip(logged, self.expected.steps, strict=True):
            extra = {name for name in actual if not name.startswith(GROUPS)} - {
                f"train/{name}" for name in expected
            }
            if {value for name, value in actual.items() if name.startswith(GROUPS)} != {
                COMMON["lr"]
            }:
                self.problems.append(f"step {step} has another learning rate than {COMMON['lr']}")
            if extra:
                self.problems.append(f"step {step} also logs {sorted(extra)}")
            for name, value in expected.items():
                if f"train/{name}" not in actual:
                    self.problems.append(f"step {step} lacks train/{name}")
                    continue
                scale = 1.0 if _cancels(name) else 0.0
                target = self.gradients if name.endswith("grad_norm") else self.values
                target[f"step {step} {name}"] = relative(
                    actual[f"train/{name}"], value, scale=scale
                )

    def _phase(self) -> None:
        actual = {
            name: value
            for _, metrics in self.metrics.get("rollout/step", [])
            for name, value in metrics.items()
        }
        for name, value in self.expected.phase.items():
            if f"rollout/{name}" not in actual:
                self.problems.append(f"rollout/{name} is missing")
                continue
            scale = 1.0 if _cancels(name) else 0.0
            self.values[f"rollout/{name}"] = relative(actual[f"rollout/{name}"], value, scale=scale)

    def _rollout_side(self) -> None:
        """What both sides say must be one number."""
        for rank in self.by_rank if "raw_reward" in self.expected.phase else ():
            self.values["reward on both sides"] = relative(
                rank.rollout_side["reward/mean"], self.expected.phase["raw_reward"]
            )

    def _one_process(self) -> None:
        """Every metric but times is what one process logs, those that the reference does not
        compute included.
        """
        if self.single is None:
            return
        mine, theirs = named_metrics(self.metrics), named_metrics(self.single)
        if sorted(mine) != sorted(theirs):
            self.problems.append(
                f"metrics {sorted(set(mine) ^ set(theirs))} are logged by one process or by these "
                "ranks only"
            )
        for name in set(mine) & set(theirs):
            scale = 1.0 if _cancels(name.partition(" ")[2].partition("/")[2]) else 0.0
            target = self.gradients if name.endswith(("grad_norm", "weight_delta")) else self.values
            target[f"{name} of one process"] = relative(mine[name], theirs[name], scale=scale)

    def _tensors(self) -> None:
        (weights,) = (rank.weights for rank in self.by_rank if rank.weights)
        gradients = [rank.gradients for rank in self.by_rank if any(rank.gradients)]
        self._compare_tensors("weight", weights, self.expected.weights, self.values)
        for step, (actual, expected) in enumerate(
            zip(gradients[0], self.expected.gradients, strict=True)
        ):
            self._compare_tensors(f"step {step} gradient", actual, expected, self.gradients)

    def _replicas(self) -> None:
        """Ranks that hold the same part of the model have the same bits."""
        first: dict[tuple[str, int], torch.Tensor] = {}
        for rank in self.by_rank:
            for key, tensor in rank.held.items():
                if not torch.equal(first.setdefault(key, tensor), tensor):
                    self.problems.append(
                        f"replicas of {key[0]} differ by "
                        f"{float((first[key] - tensor).abs().max()):.1e}"
                    )

    def _compare_tensors(
        self, kind: str, actual: dict, expected: dict, into: dict[str, float]
    ) -> None:
        if sorted(actual) != sorted(expected):
            self.problems.append(
                f"{kind}s {sorted(set(actual) ^ set(expected))} are on one side only"
            )
        scale = 1e-3 * max(float(t.abs().max()) for t in expected.values())
        for name in sorted(set(actual) & set(expected)):
            into[f"{kind} {name}"] = tensor_difference(actual[name], expected[name], scale=scale)


def last_line(cells: list[Cell]) -> str:
    """`layouts: N cells passed, M failed, max relative difference X`."""
    passed = [cell for cell in cells if not cell.failure]
    largest = max((cell.difference for cell in passed), default=0.0)
    return (
        f"layouts: {len(passed)} cells passed, {len(cells) - len(passed)} failed, max relative "
        f"difference {largest:.1e}"
    )
