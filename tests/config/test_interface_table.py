"""Every name, option, field and metric of upstream's interface is here as documented, or the table
says why not.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import interface_check  # noqa: E402
from interface_check import Row, difference, report, rows_of_description  # noqa: E402

NUM_GPUS = 0


def test_what_differs_from_upstream_has_a_reason_and_every_reason_is_needed():
    """Every difference from upstream's interface has a reason in the table, and every reason is
    needed."""
    rows = interface_check.read_table()
    assert len(rows) > 500 and len({row.key for row in rows}) == len(rows)
    _, problems = report(rows)
    assert problems == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (Row("name", "slime.utils.misc.load_functions"), "is missing"),
        (Row("name", "slime.utils.ppo_utils.vanilla_gae", "(rewards, values, gamma, lambd)"), None),
        (
            Row("name", "slime.utils.ppo_utils.vanilla_gae", "(values, rewards, gamma, lambd)"),
            "at another place",
        ),
        (
            Row(
                "name",
                "slime.utils.ppo_utils.chunked_gae",
                "(rewards, values, gamma, lambd, chunk_size=64)",
            ),
            "the default 128",
        ),
        (
            Row("name", "slime.utils.ppo_utils.vanilla_gae", "(rewards, values, gamma)"),
            "needs lambd too",
        ),
        (Row("option", "--eps-clip", "0.3"), "has the default 0.2"),
        (Row("option", "--no-such-option"), "is not known"),
        (Row("field", "response_length", "1"), "has the default 0"),
        (Row("field", "no_such_field", "None"), "is missing"),
        (Row("metric", "rollout/response_len/{mean,zeroth}"), "make up response_len/zeroth"),
        (Row("metric", "perf/longest_effective_sample_tokens_per_sec"), None),
    ],
    ids=str,
)
def test_differences_are_found(row, told):
    """Differences in names, places and defaults of parameters, defaults of options and fields, and
    keys of metrics are found."""
    found = difference(row)
    assert found is None if told is None else told in found


def test_a_description_is_read_mechanically():
    """A description of upstream's interface is read by a parser, so that a newer one is compared by
    one command."""
    text = """## 8. Losses
### 8.1 `slime.utils.ppo_utils`
* `vanilla_gae(rewards, values, gamma, lambd)`, `new_function(a, *, b=1)`.
| --eps-clip 0.2, --eps-clip-high | | clip |
`train/pg_loss` and `train/new_key`
"""
    assert list(rows_of_description(text)) == [
        Row("name", "slime.utils.ppo_utils"),
        Row("name", "slime.utils.ppo_utils.vanilla_gae", "(rewards, values, gamma, lambd)"),
        Row("name", "slime.utils.ppo_utils.new_function", "(a, *, b=1)"),
        Row("option", "--eps-clip", "0.2"),
        Row("option", "--eps-clip-high"),
        Row("metric", "train/pg_loss"),
        Row("metric", "train/new_key"),
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
