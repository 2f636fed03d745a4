"""config.json -> ModelShape: read and checked in one place, for trainer, engine and converters."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_features import CONFIGS, FEATURES, LLAMA3
from support.options import write_run_inputs

from slime.exceptions import ConfigError
from slime.models.families import FAMILIES, is_derived_tensor
from slime.models.megatron_fields import contradictions, megatron_fields
from slime.models.param_mapping import match
from slime.models.shape import ModelShape, model_shape, read_model_shape
from slime.models.weight_shapes import expected_hf_names

NUM_GPUS = 0

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 1000000.0, "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 2,
    "mlp_only_layers": [3], "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


# --- one reading for all --------------------------------------------------------------------------


def by_trainer(folder: Path, monkeypatch) -> None:
    """Parses the command line as upstream's training script does."""
    from slime.backends.megatron_utils.arguments import megatron_parse_args

    monkeypatch.setattr(sys, "argv", ["train.py", *write_run_inputs_around(folder)])
    megatron_parse_args(None)


def by_dry_run(folder: Path, monkeypatch) -> None:
    """Parses the command line of `slime train --dry-run`."""
    from slime.utils.arguments import parse_args

    parse_args([*write_run_inputs_around(folder), "--dry-run"])


def by_engine(folder: Path, monkeypatch) -> None:
    """Builds the embedded engine."""
    from slime.backends.torch_engine.build import load_engine
    from slime.backends.torch_engine.engine_config import EngineConfig

    load_engine(EngineConfig(hf_checkpoint=str(folder), device="cpu"), notify=lambda *a: None)


def by_converter(folder: Path, monkeypatch) -> None:
    """Loads the folder's weights into a model of no parameters."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights

    load_hf_weights(argparse.Namespace(), [], folder)


READERS = (by_trainer, by_dry_run, by_engine, by_converter)


def write_run_inputs_around(folder: Path) -> list[str]:
    text = (folder / "config.json").read_text()
    words = write_run_inputs(folder.parent)
    (folder / "config.json").write_text(text)
    return words


def refusal(reader, folder: Path, monkeypatch) -> str | None:
    """What `reader` says against the config; None where it takes it and then misses the weights."""
    try:
        reader(folder, monkeypatch)
    except ConfigError as error:
        return None if "*.safetensors" in str(error) else str(error)
    return None


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_what_one_reader_takes_the_others_take(feature, tmp_path, monkeypatch):
    """Trainer, dry run, engine and converter take the same configs and refuse the others in the
    same sentence, which names file, key, value and what is supported."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(feature.config()))
    said = {reader.__name__: refusal(reader, folder, monkeypatch) for reader in READERS}
    if feature.words is None:
        assert said == dict.fromkeys(said)
        return
    with pytest.raises(ConfigError) as caught:
        read_model_shape(folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"{folder / 'config.json'}: ")
    assert all(words in sentence for words in (*feature.words, "supported: ")), sentence
    assert all(text is not None and sentence in text for text in said.values()), said


def test_a_refused_config_ends_a_dry_run_with_the_sentence(tmp_path, capsys):
    """`slime train --dry-run` prints the sentence and ends with status 2."""
    from slime.cli import main

    words = write_run_inputs(tmp_path)
    config = {**CONFIGS["llama"], "layer_types": ["full_attention", "chunked_attention"]}
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(config))
    assert main(["train", *words, "--dry-run"]) == 2
    assert (
        f"{path}: layer_types has 'chunked_attention', which is not supported; supported: "
        "full_attention." in capsys.readouterr().err
    )


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
ALL_KEYS = sorted({key for feature in FEATURES for key in feature.config()})
ROPE_KEYS = sorted({"type", *LLAMA3, "rope_theta", "partial_rotary_factor"})


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(st.sampled_from(ALL_KEYS), JSON_VALUES | st.integers(0, 9), max_size=4),
    st.dictionaries(st.sampled_from(ROPE_KEYS), JSON_VALUES | st.integers(0, 9), max_size=4),
)
def test_any_config_is_taken_or_refused_in_words(family, changes, rope):
    """Whatever JSON a config holds, it gives a shape with usable options, or a ConfigError; no other
    exception."""
    config = {**CONFIGS[family], "rope_scaling": {**LLAMA3, **rope} if rope else None, **changes}
    try:
        shape = model_shape(config)
    except ConfigError as error:
        assert "supported: " in str(error)
        return
    fields = megatron_fields(shape)
    assert contradictions(fields, shape) == []
    assert all(math.isfinite(value) for value in fields.values() if isinstance(value, float))
    assert len(set(expected_hf_names(shape))) >= 3


def test_the_shape_is_frozen():
    """No reader can change what the others read."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        model_shape(LLAMA).num_layers = 1
    with pytest.raises(TypeError):
        FAMILIES["mine"] = FAMILIES["llama"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_missing_or_broken_config_file_is_named(text, words, tmp_path):
    """A missing or broken config.json is named."""
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words) as caught:
        read_model_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


# --- Megatron's options ---------------------------------------------------------------------------


def test_a_llama_config_gives_its_shape_and_its_rotary_scaling():
    """Llama 3.2 1B's config gives tied embeddings, grouped queries and scaled frequencies."""
    fields = megatron_fields(model_shape(LLAMA))
    assert fields["num_query_groups"] == 8 and fields["group_query_attention"] is True
    assert fields["kv_channels"] == 64 and fields["ffn_hidden_size"] == 8192
    assert fields["untie_embeddings_and_output_weights"] is False
    assert (fields["rotary_base"], fields["use_rope_scaling"], fields["rope_scaling_factor"]) == (
        500000.0,
        True,
        32.0,
    )
    assert (
        fields["layernorm_epsilon"] == 1e-5
        and fields["add_qkv_bias"] is False
        and fields["qk_layernorm"] is False
    )


def test_qwen2_has_biased_queries_and_no_scaling_fields():
    """Qwen2.5 0.5B's config gives biased queries and the head size from hidden size and heads."""
    fields = megatron_fields(model_shape(QWEN2))
    assert fields["kv_channels"] == 64 and fields["add_qkv_bias"] is True
    assert (fields["use_rope_scaling"], fields["rope_scaling_factor"]) == (False, 1.0)


def test_a_moe_config_says_which_layers_have_experts():
    """With experts in every second layer and layer 3 listed as dense, only layer 1 has experts."""
    fields = megatron_fields(model_shape(QWEN3_MOE))
    assert fields["moe_layer_freq"] == [0, 1, 0, 0]
    assert (
        fields["num_moe_experts"],
        fields["moe_router_topk"],
        fields["moe_ffn_hidden_size"],
    ) == (8, 2, 32)
    assert fields["moe_router_pre_softmax"] is False and fields["qk_layernorm"] is True


def test_flags_that_contradict_the_model_are_named_with_both_values():
    """All flags that contradict the model are named with both values; an absent flag and a longer
    context are no contradiction."""
    options = {
        "num_layers": 12, "rotary_base": 500000, "hidden_size": None, "max_position_embeddings": 4096, "vocab_size": 7,
    }  # fmt: skip
    problems = contradictions(options, model_shape(LLAMA))
    assert len(problems) == 2
    assert problems[0].startswith("--num-layers is 12, but the model's config.json says 16.")
    assert problems[1].startswith("--vocab-size is 7, ")


def test_scaling_that_the_model_does_not_have_is_a_contradiction():
    """--use-rope-scaling for a model without scaling is refused: the engine would not scale."""
    options = {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
    first, second = contradictions(options, model_shape(QWEN2))
    assert first.startswith("--use-rope-scaling is True, but the model's config.json says False.")
    assert second.startswith("--rope-scaling-factor is 8.0, but the model's config.json says 1.0.")


# --- names of weights -----------------------------------------------------------------------------

WEIGHT_CASES = {
    **{family: (family, {}) for family in CONFIGS},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
}


def shape_of(case: str) -> ModelShape:
    family, changes = WEIGHT_CASES[case]
    return model_shape({**CONFIGS[family], **changes})


@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_engine_and_converter_know_the_same_weights(case):
    """The engine's weights are those that the trainer's converter expects in a folder; of tied
    embeddings the head may be stored, but is no weight of its own."""
    import torch

    from slime.backends.torch_engine.model import Decoder

    shape = shape_of(case)
    decoder = Decoder(shape, device=torch.device("cpu"), dtype=torch.float32)
    head = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    assert set(decoder.weights) | head == set(expected_hf_names(shape))


@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_a_stored_model_of_transformers_has_the_expected_names(case, tmp_path):
    """Transformers stores the tensors of exactly these names, with no head where it is tied."""
    from safetensors import safe_open
    from support.tiny_models import make_tiny_checkpoint

    family, changes = WEIGHT_CASES[case]
    folder = make_tiny_checkpoint(tmp_path / "model", family, **changes)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    shape = read_model_shape(folder)
    head = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    assert stored == set(expected_hf_names(shape)) - head


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_of_a_family_is_found_by_its_megatron_name(family):
    """A rule that another one hides would never be used."""
    for rule in FAMILIES[family].rules:
        assert match(family, rule.megatron.format(layer=3, expert=1)).rule is rule


def stored_llama(folder: Path, *, config: dict | None = None, **tensors) -> Path:
    """A tiny Llama folder with `tensors` added or replaced and keys of its config changed; dots in
    names are written as double underscores.
    """
    from safetensors.torch import load_file, save_file
    from support.tiny_models import make_tiny_checkpoint

    make_tiny_checkpoint(folder, "llama", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return folder


def test_tensors_that_follow_from_the_config_are_skipped(tmp_path, monkeypatch):
    """Old Llama folders store the rotary frequencies; trainer and engine take such a folder."""
    import torch

    assert not is_derived_tensor("model.layers.0.self_attn.q_proj.weight")
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    folder = stored_llama(tmp_path / "model", **{name: torch.ones(4)})
    by_engine(folder, monkeypatch)
    by_converter(folder, monkeypatch)


def test_a_tensor_that_the_shape_does_not_have_is_refused_by_both(tmp_path, monkeypatch):
    """Biases in the file but not in the config were dropped by the trainer and refused by the
    engine; now both refuse."""
    import torch

    name = "model__layers__0__self_attn__q_proj__bias"
    folder = stored_llama(tmp_path / "model", **{name: torch.ones(32)})
    for reader in (by_engine, by_converter):
        with pytest.raises(ConfigError, match="model.layers.0.self_attn.q_proj.bias"):
            reader(folder, monkeypatch)


def test_a_head_that_differs_from_its_tied_embedding_is_refused_by_both(tmp_path, monkeypatch):
    """A stored head is taken where it equals the embedding that the config ties it to."""
    import torch
    from safetensors.torch import load_file

    folder = stored_llama(tmp_path / "equal")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    equal = stored_llama(tmp_path / "equal", lm_head__weight=embedding.clone())
    other = stored_llama(tmp_path / "other", lm_head__weight=torch.zeros_like(embedding))
    for reader in (by_engine, by_converter):
        reader(equal, monkeypatch)
        with pytest.raises(ConfigError, match="lm_head.weight differs from model.embed_tokens"):
            reader(other, monkeypatch)


def test_weights_of_another_model_are_refused_before_they_are_read(tmp_path):
    """A folder whose config contradicts the options holds another model, whatever its tensors."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights

    folder = stored_llama(tmp_path / "model", config={"rms_norm_eps": 1e-5})
    with pytest.raises(ConfigError, match="holds another model: --layernorm-epsilon is 1e-06"):
        load_hf_weights(argparse.Namespace(layernorm_epsilon=1e-6), [], folder)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, "has rms_norm_eps 1e-05, the model in use has 1e-06"),
        ("llama", {"rope_theta": 5e5}, "has rope "),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2}, "has num_heads 2"),
        ("llama", {"model_type": "qwen2"}, "has model_type qwen2, the model in use has llama"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "has num_experts_per_token 1"),
        ("qwen3_moe", {"norm_topk_prob": False}, "has norm_topk_prob False"),
    ],
)
def test_what_no_tensor_shows_is_compared_before_an_update(family, changes, words):
    """New weights whose config computes something else from the same tensors are refused; a longer
    context is not."""
    ours = model_shape(CONFIGS[family])
    longer = model_shape({**CONFIGS[family], "max_position_embeddings": 256})
    ours.check_same_computation(longer, "there")
    with pytest.raises(ConfigError, match=f"^there {words}"):
        ours.check_same_computation(model_shape({**CONFIGS[family], **changes}), "there")


# --- rotary frequencies ---------------------------------------------------------------------------


def test_our_llama3_scaling_has_the_bits_of_megatrons():
    """With Megatron-core's constants the scaled frequencies of trainer and engine equal those that
    Megatron-core computes, bit for bit."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from slime.models.rope import inverse_frequencies

    for factor, theta, size in ((8.0, 500000.0, 128), (32.0, 500000.0, 64), (8.0, 10000.0, 8)):
        shape = model_shape(
            {**LLAMA, "rope_theta": theta, "rope_scaling": {**LLAMA3, "factor": factor}}
        )
        theirs = RotaryEmbedding(
            size, 1.0, rotary_base=theta, rope_scaling=True, rope_scaling_factor=factor, use_cpu_initialization=True
        )  # fmt: skip
        assert torch.equal(inverse_frequencies(shape.rope, size), theirs.inv_freq)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
