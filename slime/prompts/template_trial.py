"""Renders sample conversations with one chat template within limits: a program of its own, run by
its path, with the template and the tokenizer's marks as JSON on stdin.

Status 0: all renders ended, rightly or with an error of the template. TOO_MUCH: one exceeded a
limit, which stdout names. The environment has what templates expect of transformers' one.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any

MAX_CHARS = 16 * 2**20
MEMORY_BYTES = 2 * 2**30
CPU_SECONDS = 5
TOO_MUCH = 3
CONVERSATIONS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hi"},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nIt is 2."},
        {"role": "tool", "content": "a result"},
        {"role": "user", "content": "And 2 + 2?"},
    ),
)


def environment() -> Any:
    """A sandbox like the one that renders chat templates."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks what an assistant writes."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def try_template(template: str, marks: dict[str, str]) -> str | None:
    """The limit that a sample conversation exceeds, None where each ends within them."""
    try:
        compiled = environment().from_string(template)
    except MemoryError:
        return f"needs more than {MEMORY_BYTES >> 30} GiB of memory"
    except Exception:  # noqa: BLE001 - the tokenizer's library says what is wrong with it
        return None
    for messages in CONVERSATIONS:
        try:
            size = 0
            for piece in compiled.generate(
                messages=list(messages), tools=None, add_generation_prompt=True, **marks
            ):
                size += len(piece)
                if size > MAX_CHARS:
                    return f"makes more than {MAX_CHARS} characters of a few words"
        except MemoryError:
            return f"needs more than {MEMORY_BYTES >> 30} GiB of memory for a few words"
        except Exception:  # noqa: BLE001, S112 - templates refuse conversations as they like
            continue
    return None


def main() -> int:
    """Reads the template, tries it, prints what it exceeds."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    question = json.load(sys.stdin)
    problem = try_template(question["template"], question["marks"])
    if problem is None:
        return 0
    print(problem)
    return TOO_MUCH


if __name__ == "__main__":
    sys.exit(main())
