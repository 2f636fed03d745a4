"""A model folder is untrusted data: the dry run finds what is wrong with its weights, tokenizer,
config.json and chat template before anything starts, with a sentence and within seconds."""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs, write_weights
from support.tiny_models import make_char_tokenizer

from slime.commands.dry_run import dry_run
from slime.exceptions import ConfigError
from slime.models.safetensors_header import read_header
from slime.models.shape import read_model_shape
from slime.models.weight_shapes import expected_tensors
from slime.preflight.weights import check_weights
from slime.prompts import template_limits
from slime.prompts.chat_render import ChatTemplate
from slime.prompts.template_limits import TemplateLimit, apply_template
from slime.utils.arguments import parse_args

NUM_GPUS = 0

NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A command line whose dry run is right."""
    folder = tmp_path_factory.mktemp("whole")
    write_run_inputs(folder)
    make_char_tokenizer().save_pretrained(folder / "model")
    write_weights(folder / "model", dict(expected_tensors(read_model_shape(folder / "model"))))
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole / "model", tmp_path / "model")
    return tmp_path


def run_dry(folder):
    config = (folder / "model" / "config.json").read_bytes()
    words = write_run_inputs(folder)
    (folder / "model" / "config.json").write_bytes(config)
    return dry_run(parse_args([*words, "--apply-chat-template", "--dry-run"]))


def rewrite_header(path, change):
    """Changes the header of a safetensors file and leaves its numbers."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def rename_tensor(header):
    header["model.layers.0.mlp.up.weight"] = header.pop("model.layers.0.mlp.up_proj.weight")


def transpose_tensor(header):
    header["model.layers.1.mlp.down_proj.weight"]["shape"].reverse()


def retype_tensor(header):
    entry = header["model.norm.weight"]
    entry.update(dtype="F8_E4M3", shape=[4 * entry["shape"][0]])


def overlap(header):
    header["model.norm.weight"]["data_offsets"] = [0, 128]


def negative(header):
    header["model.norm.weight"]["shape"] = [-32]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def poison(path):
    entry = next(entry for entry in read_header(path) if entry.name == "model.norm.weight")
    content = bytearray(path.read_bytes())
    content[entry.start + 40 : entry.start + 44] = b"\x00\x00\xc0\x7f"
    path.write_bytes(content)


def index_of_two(path):
    (path.parent / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})
    )


def huge_header(path):
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is cut: it has"),
        (lambda path: path.unlink(), "no *.safetensors file"),
        (lambda path: path.write_bytes(b""), "is cut or no safetensors file"),
        (huge_header, "its header is said to have 4611686018427387904"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is longer than its tensors"),
        (index_of_two, "names model-00002-of-00002.safetensors: missing"),
        (lambda path: rewrite_header(path, rename_tensor), "1 tensors are missing: model.layers.0.mlp.up_proj.weight"),
        (lambda path: rewrite_header(path, transpose_tensor), "has [64, 32], the model's is [32, 64]"),
        (lambda path: rewrite_header(path, retype_tensor), "model.norm.weight is F8_E4M3"),
        (lambda path: rewrite_header(path, overlap), "begins at byte"),
        (lambda path: rewrite_header(path, negative), "the header's entry of 'model.norm.weight'"),
        (poison, "model.norm.weight: NaN or infinite"),
    ],
)  # fmt: skip
def test_the_dry_run_finds_broken_weights(folder, capsys, damage, said):
    """Weights that are cut, missing, of another shape or type, or hold a NaN fail the dry run, which
    names the file or tensor; headers are read, not the weights."""
    damage(folder / "model" / "model.safetensors")
    assert run_dry(folder) == 1
    out = capsys.readouterr().out
    assert said in out and "✗" in out and "Traceback" not in out


def test_the_dry_run_of_a_whole_folder_shows_what_it_looked_at(folder, capsys):
    """A whole folder passes, and the line has the number of tensors."""
    assert run_dry(folder) == 0
    assert "✓ 25 tensors, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 10**9}, "hidden_size 1000000000"),
        ({"hidden_size": 1e9}, "hidden_size 1000000000.0"),
        ({"hidden_size": "128"}, "hidden_size '128'"),
        ({"num_attention_heads": -4}, "num_attention_heads -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 2**24}, "has [102, 32], the model's is [16777216, 32]"),
        ({"head_dim": 2**24}, "the model's is"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps 'x'"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
        ({"rope_scaling": [1]}, "rope_scaling [1]"),
    ],
)
def test_a_config_json_with_absurd_values_is_a_sentence(folder, capsys, fields, said):
    """An absurd config.json is refused with file, key and value, never with a traceback."""
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    try:
        status = run_dry(folder)
        text = capsys.readouterr().out
    except (ConfigError, SystemExit) as error:
        status, text = 1, str(error) + capsys.readouterr().err
    assert status == 1 and said in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("tokenizer.json", "cannot load a tokenizer"),
        ("tokenizer_config.json", "no tokenizer_config.json"),
        ("[]", "TypeError"),
        ("{}", "cannot load a tokenizer"),
        ("null", "cannot load a tokenizer"),
        ("vocabulary", "with id 100, the model has 98"),
    ],
)
def test_the_dry_run_finds_a_tokenizer_that_is_incomplete_or_another(folder, capsys, damage, said):
    """Missing or damaged tokenizer files fail the dry run, and so does a tokenizer with ids beyond
    the model's embedding."""
    model = folder / "model"
    if damage == "vocabulary":
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 98}))
        write_weights(model, dict(expected_tensors(read_model_shape(model))))
    elif damage.endswith(".json"):
        (model / damage).unlink()
    else:
        (model / "tokenizer.json").write_text(damage)
    assert run_dry(folder) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED_LOOPS, "did not end within"),
        (
            NESTED_LOOPS.replace("{% endfor %}", "x" * 999 + "{% endfor %}", 1),
            "characters of a few words",
        ),
        ("{{ 'x' * 99999999999 }}", "of memory"),
        ("{{ 9 ** (9 ** 9) }}", "did not end within"),
        ("{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "characters"),
    ],
)
def test_the_dry_run_ends_with_any_chat_template(folder, capsys, monkeypatch, template, said):
    """A chat template is a program from the model's folder: one that loops, powers or grows without
    end fails the dry run in seconds, as it would fail training."""
    monkeypatch.setattr(template_limits, "TRIAL_SECONDS", 3.0)
    monkeypatch.setattr(template_limits, "_problems", {})
    (folder / "model" / "chat_template.jinja").write_text(template)
    start = time.monotonic()
    assert run_dry(folder) == 1
    assert time.monotonic() - start < 12
    out = capsys.readouterr().out
    assert "✗ the chat template" in out and said in out


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_render_is_interrupted_at_its_limit(monkeypatch, where):
    """A template that passed its trial and loops on one conversation is interrupted there, in any
    thread; the next render is not disturbed."""
    monkeypatch.setattr(template_limits, "RENDER_SECONDS", 0.5)
    loops = "{% if messages[0].content == 'loop' %}" + NESTED_LOOPS + "{% endif %}ok"
    template = ChatTemplate(make_char_tokenizer(chat_template=loops))
    results = []

    def render():
        for content in ("Hi", "loop", "Hi"):
            try:
                results.append(template.render([{"role": "user", "content": content}]))
            except TemplateLimit as error:
                results.append(str(error)[:49])

    thread = threading.Thread(target=render)
    start = time.monotonic()
    if where == "main thread":
        render()
    else:
        thread.start()
        thread.join(20)
    assert results == ["ok", "the chat template did not end within 0.5 s on 1 m", "ok"]
    assert time.monotonic() - start < 10


def test_a_render_that_is_too_long_is_refused(monkeypatch):
    """A text above the limit is refused with its length."""
    monkeypatch.setattr(template_limits, "MAX_CHARS", 1000)
    tokenizer = make_char_tokenizer()
    assert len(apply_template(tokenizer, [{"role": "user", "content": "x" * 900}])) < 1000
    with pytest.raises(TemplateLimit, match="a text of 1028 characters"):
        apply_template(tokenizer, [{"role": "user", "content": "x" * 1000}])


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_pipe_in_a_model_folder_is_a_sentence(folder, name):
    """A pipe in place of a file of the folder is named; nothing waits for it."""
    path = folder / "model" / name
    path.unlink()
    os.mkfifo(path)
    if name == "config.json":
        with pytest.raises(ConfigError, match=r"config\.json is no regular file"):
            read_model_shape(folder / "model")
        return
    with pytest.raises(ConfigError, match=f"{name} is no regular file"):
        run_dry(folder)


def test_headers_of_many_tensors_are_checked_in_time(tmp_path):
    """A model of 36 layers with full widths is checked in under a second: its 14 GB stand in a
    sparse file, of which only the header and the first numbers are read."""
    config = {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    path = write_weights(tmp_path, dict.fromkeys(dict(expected_tensors(shape)), ()))

    def grow(header):
        stop = 0
        for name, size in expected_tensors(shape):
            if header[name]["shape"] != list(size):
                start, stop = stop, stop + 4 * _product(size)
                header[name] = {"dtype": "F32", "shape": list(size), "data_offsets": [start, stop]}

    rewrite_header(path, grow)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    os.truncate(path, 8 + length + max(entry["data_offsets"][1] for entry in header.values()))
    start = time.monotonic()
    report = check_weights(tmp_path, shape)
    assert report.problems == [] and report.num_tensors == 399 and report.num_bytes > 30e9
    assert time.monotonic() - start < 2


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
