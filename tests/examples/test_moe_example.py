"""The mixture-of-experts example's model, recipes and verdict. Its run is
tests/e2e/test_layout_runs.py's, in short.
"""

import json

import pytest
import yaml

from examples.moe import prepare, run

NUM_GPUS = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare.prepare(tmp_path_factory.mktemp("moe"))


def test_the_model_is_a_mixture_that_loads_and_is_made_once(folder):
    """Two of four experts per token in each of two layers, under Qwen3-MoE's names, and the same
    bytes when asked again.
    """
    from safetensors import safe_open

    with safe_open(folder / "model" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
        for layer in range(2)
        for expert in range(4)
    }
    assert experts <= names
    config = json.loads((folder / "model" / "config.json").read_text())
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert prepare.prepare(folder) == folder
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_every_recipe_parses_with_its_layout(folder, tmp_path):
    """Every recipe parses with the layout that the page promises."""
    from slime.utils.arguments import parse_args

    words = dict(run.commands(folder, tmp_path / "run", ["--hf-checkpoint", str(folder / "model")]))
    sft, grpo = (parse_args(words[name][3:]) for name in ("the warm-up", "GRPO"))
    assert (sft.actor_num_gpus_per_node, sft.expert_model_parallel_size) == (2, 2)
    assert (
        grpo.tensor_model_parallel_size,
        grpo.context_parallel_size,
        grpo.sequence_parallel,
    ) == (2, 2, True)
    assert grpo.actor_num_gpus_per_node == 4 and grpo.num_moe_experts == 4


@pytest.mark.parametrize(
    ("distance", "accuracies", "status"),
    [
        (1e-5, (0.25, 0.4), 0),
        (0.1, (0.25, 0.4), 1),
        (float("nan"), (0.25, 0.4), 1),
        (1e-5, (0.25,), 1),
    ],
)
def test_the_verdict_needs_both_accuracies_and_agreement(
    distance, accuracies, status, tmp_path, capsys
):
    """A run without two evaluations, or whose trainer and engine drift apart, is no success."""
    records = [
        {
            "time": 0,
            "process": "a",
            "step_key": "eval/step",
            "step": i,
            "metrics": {"eval/addition": a},
        }
        for i, a in enumerate(accuracies)
    ]
    record = {
        "rollout/logprob_abs_diff/max": distance,
        "rollout/ledger/sampled": 8,
        "rollout/ledger/trained": 8,
        "rollout/ledger/dropped": 0,
    }
    record["train/weight_delta"] = 1e-3
    for step in range(2):
        moved = record | {"rollout/raw_reward": 0.3 + 0.1 * step}
        records.append(
            {"time": 0, "process": "a", "step_key": "rollout/step", "step": step, "metrics": moved}
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert run.conclude(tmp_path, started=0.0) == status
    assert ("PROBLEM" in capsys.readouterr().err) == bool(status)


def test_recipes_name_no_paths():
    """Recipes contain no paths; run.py gives them, so that the example runs from anywhere."""
    for name in ("sft.yaml", "grpo.yaml"):
        assert not [
            value
            for value in yaml.safe_load((run.HERE / name).read_text()).values()
            if str(value).startswith("/")
        ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
