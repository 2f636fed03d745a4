"""Options come from dataclasses: one name and one sentence each, and Megatron's fields without
importing torch."""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from slime.config.megatron import (
    NOT_FLAGS,
    ModelShapeOptions,
    NumericsOptions,
    OptimizerOptions,
    ParallelOptions,
    fields_of_source,
    megatron_fields,
    megatron_specs,
)
from slime.config.option import REQUIRED, option
from slime.config.specs import (
    all_specs,
    convert_text,
    option_classes,
    read_annotation,
    require_unique,
    specs_of_dataclass,
)
from slime.exceptions import ConfigError

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sample options."""

    count: int = option(REQUIRED, "How many.")
    rate: float = option(0.5, "A rate.")
    name: str | None = option(None, "A name.", choices=("a", "b"))
    stops: list[str] | None = option(None, "Stops.")
    hooks: list[str] | None = option(None, "Hooks.", repeat=True)
    extra: dict = option({}, "A dict.")
    verbose: bool = option(False, "Say more.")
    shuffle: bool = option(True, "Shuffle.")
    normalize: bool = option(True, "Normalize.", disable_flag="--disable-normalization")
    kind: typing.Literal["x", "y"] = option("x", "A kind.")


def test_a_field_becomes_a_flag_with_its_type_choices_and_ways_to_switch_it_off():
    """A dataclass field becomes a flag with its type, choices and negative form."""
    specs = {spec.name: spec for spec in specs_of_dataclass(Sample)}
    assert (specs["count"].flag, specs["count"].kind, specs["count"].required) == (
        "--count",
        int,
        True,
    )
    assert (specs["stops"].many, specs["stops"].repeat, specs["hooks"].repeat) == (
        True,
        False,
        True,
    )
    assert specs["name"].choices == ("a", "b") and specs["kind"].choices == ("x", "y")
    assert specs["verbose"].flags == ("--verbose",)
    assert specs["shuffle"].flags == ("--no-shuffle",)
    assert specs["normalize"].flags == ("--disable-normalization",)
    assert specs["extra"].kind is dict and specs["extra"].default == {}
    assert {spec.group for spec in specs.values()} == {"Sample options"}


def test_a_type_that_no_command_line_can_express_is_refused_where_it_is_declared():
    """A field of a type that no command line can express is refused at its declaration."""
    with pytest.raises(TypeError, match="one type and None at most"):
        read_annotation(int | str)
    bad = dataclasses.make_dataclass(
        "Bad",
        [("path", "pathlib.Path", option(None, "A path."))],
        namespace={"__module__": __name__},
    )
    with pytest.raises((TypeError, NameError)):
        specs_of_dataclass(bad)


def test_no_two_options_share_a_name_or_a_flag():
    """No two options share a name or a flag; argparse would let the later one win."""
    require_unique(all_specs())
    twice = specs_of_dataclass(Sample) + [
        dataclasses.replace(specs_of_dataclass(Sample)[0], group="Other")
    ]
    with pytest.raises(ConfigError, match="count is declared in 'Sample options' and in 'Other'"):
        require_unique(twice)


def test_every_option_has_a_sentence_and_a_default_of_its_type():
    """Every option has a sentence of help and a default that its own flag accepts."""
    for cls in option_classes():
        for spec in specs_of_dataclass(cls):
            assert len(spec.help) > 8 and spec.help.rstrip()[-1] in ".)!", (
                f"{cls.__name__}.{spec.name}: {spec.help!r}"
            )
            if spec.default is not None:
                items = spec.default if spec.many else [spec.default]
                assert all(type(item) is spec.kind for item in items), (
                    f"{cls.__name__}.{spec.name} = {spec.default!r}"
                )
                assert spec.choices is None or all(item in spec.choices for item in items)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "1e6", "'1e6' is not a whole number. Write 1000000."),
        (int, "2.5", "'2.5' is not a whole number."),
        (int, "two", "'two' is not a whole number."),
        (float, "fast", "'fast' is not a number."),
        (float, "nan", "NaN is not a usable number."),
        (dict, "[1]", "is not a JSON object"),
        (dict, "{a}", "is not JSON"),
        (bool, "maybe", "'maybe' is not true or false."),
    ],
)
def test_a_value_of_a_wrong_type_says_what_would_be_right(kind, text, message):
    """A value of a wrong type is refused with what would be right."""
    spec = dataclasses.replace(specs_of_dataclass(Sample)[1], kind=kind)
    with pytest.raises(ValueError) as caught:
        convert_text(spec, text)
    assert message in str(caught.value)


# Fields of megatron-core that a slime dataclass declares too, on purpose: slime's declaration is the one flag.
SHARED_NAMES = {
    field.name
    for cls in (ParallelOptions, ModelShapeOptions, OptimizerOptions, NumericsOptions)
    for field in dataclasses.fields(cls)
} | {"calculate_per_token_loss", "mtp_num_layers", "deterministic_mode"}


def test_megatron_fields_are_read_from_source_as_the_imported_classes_have_them():
    """Megatron's fields, read from source, have the names and defaults of the imported
    dataclasses."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        real = {field.name: field for field in dataclasses.fields(cls)}
        classes = (
            {cls.__name__, "ModelParallelConfig"} if cls is TransformerConfig else {cls.__name__}
        )
        ours = {field.name for field in megatron_fields() if field.config_class in classes}
        assert ours <= set(real), ours - set(real)
        simple = {
            name
            for name, field in real.items()
            if field.type in (int, float, bool, str) and not name.startswith("_")
        }
        assert simple <= ours, simple - ours
    tensor_parallel = next(
        field for field in megatron_fields() if field.name == "tensor_model_parallel_size"
    )
    assert (tensor_parallel.kind, tensor_parallel.default) == (
        int,
        "1",
    ) and "tensor" in tensor_parallel.help.lower()


def test_only_simple_fields_of_a_config_class_become_flags():
    """Fields that no command line can express, such as callables and dtypes, become no flags."""
    source = (
        "@dataclass\nclass C:\n    a: int = 1\n    'Help of a.'\n    b: Optional[Callable] = "
        "None\n    c: Literal['x', 'y'] = 'x'\n"
        "    d: Union[int, List[int]] = 1\n    e: torch.dtype = None\n    f: Optional[bool] = "
        "field(default=None, metadata={})\n    _g: int = 0\n"
        "    h: Optional[Literal[2, 3, 4]] = None\n"
    )
    fields = {field.name: field for field in fields_of_source(source, "C")}
    assert list(fields) == ["a", "c", "d", "f", "h"]
    assert (fields["h"].kind, fields["h"].choices) == (int, (2, 3, 4))
    assert (
        fields["a"].help == "Help of a."
        and fields["c"].choices == ("x", "y")
        and fields["d"].unwrap
    )
    assert fields["f"].default == "None" and fields["f"].kind is bool
    with pytest.raises(ConfigError, match="no D where slime looks"):
        fields_of_source(source, "D")


def test_a_megatron_field_that_slime_declares_too_is_on_the_list_of_shared_names():
    """A Megatron field whose name slime declares too is on the list of shared names."""
    own = {spec.name for cls in option_classes() for spec in specs_of_dataclass(cls)}
    collisions = own & {field.name for field in megatron_fields()}
    assert collisions <= SHARED_NAMES, collisions - SHARED_NAMES
    left = {spec.name for spec in megatron_specs(frozenset(own))}
    assert not left & own and not left & set(NOT_FLAGS)


def test_parsing_a_command_line_imports_no_heavy_package():
    """Parsing imports no heavy package, so that a typo is answered in a fraction of a second."""
    code = (
        "import sys; from slime.cli import main; rc = main(['train', '--no-such-flag']);"
        "heavy = {'torch', 'ray', 'transformers', 'megatron', 'numpy', 'aiohttp'} & set(sys.modules); print(rc, sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert done.stdout.split("\n")[0] == "2 []", done.stdout
    assert "Unknown flag --no-such-flag" in done.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
