"""What the gate costs. Prints numbers, asserts the limits that the project promises; exit status 1
if one is broken.

    python tools/bench/gate.py                 # 8,192 samples x 2,000 tokens: all checks without
                                               text, loop, decode
    python tools/bench/gate.py --million       # and 1,000,000 samples x 200 tokens in one call

The two numbers to compare are the gate against a loop over samples, and the share of an iteration
that each takes.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from support.gate_golden import load_tokenizer  # noqa: E402
from support.gate_reference import reason_of  # noqa: E402

from slime.data.number_list import number_list  # noqa: E402
from slime.data.sample import Sample, Status  # noqa: E402
from slime.gate import GateConfig, postprocess_output_data  # noqa: E402
from slime.gate.alignment import Codec  # noqa: E402

VOCABULARY = 150_000
CONFIG = GateConfig(
    vocab_size=VOCABULARY,
    min_response_tokens=5,
    max_response_tokens=4096,
    context_length=8192,
    rewards_expected=True,
    text_source="engine",
)


def make_samples(
    count: int, length: int, *, vocabulary: int = VOCABULARY, kind: str = "client"
) -> list[Sample]:
    """`count` samples with a prompt of 100 tokens; one in ten has a defect. `kind`: their tokens
    and log-probs as the engine's client leaves them ("client": lists that remember their arrays),
    as "list" (plain) or as "array".
    """
    convert = {"client": number_list, "list": np.ndarray.tolist, "array": lambda values: values}[
        kind
    ]
    rng = np.random.default_rng(0)
    samples = []
    for i in range(count):
        tokens = rng.integers(5, vocabulary, size=100 + length, dtype=np.int32)
        log_probs = -rng.random(length, dtype=np.float32)
        if i % 20 == 3:
            log_probs[length // 2] = np.nan
        cut = i % 20 == 13
        samples.append(
            Sample(
                index=i,
                group_index=i // 8,
                prompt="p",
                tokens=convert(tokens),
                response="text",
                response_length=length,
                rollout_log_probs=convert(log_probs),
                status=Status.TRUNCATED if cut else Status.COMPLETED,
                finish_reason="length" if cut else "stop",
                reward=float(i % 2),
            )
        )
    return samples


def best_of(function, repeats: int = 3) -> float:
    """Smallest processor time of `repeats` calls, in seconds: what one core works, whoever else
    uses the machine.
    """
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def bench_checks(count: int, length: int) -> list[str]:
    """All checks that need no text, against the per-sample loop on the same samples; and the added
    memory.
    """
    broken = []
    samples = make_samples(count, length)
    postprocess_output_data(samples[:64], CONFIG)
    seconds = best_of(lambda: postprocess_output_data(samples, CONFIG))
    gc.collect()
    tracemalloc.start()
    result = postprocess_output_data(samples, CONFIG)
    added = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    token_bytes = sum(sample.tokens.array.nbytes for sample in samples)
    reasons = [verdict.reason.value if verdict.reason else None for verdict in result.verdicts]
    samples = result = None
    part = max(1, count // 8)
    scale = count / part
    arrays, lists = (make_samples(part, length, kind=kind) for kind in ("array", "list"))
    loop_reasons = [reason_of(sample, CONFIG) for sample in lists]
    loop = scale * best_of(lambda: [reason_of(sample, CONFIG) for sample in lists])
    on_arrays = scale * best_of(lambda: postprocess_output_data(arrays, CONFIG))
    on_lists = scale * best_of(lambda: postprocess_output_data(lists, CONFIG))
    assert loop_reasons == reasons[:part], "the loop and the gate disagree"
    print(
        f"{count} x {length} tokens, all checks without text, one core (loop, arrays and plain "
        f"lists: measured on {part} samples):"
    )
    for name, spent in (
        ("as the client leaves them", seconds),
        ("arrays", on_arrays),
        ("plain lists", on_lists),
    ):
        rate = count * length / spent / 1e6
        print(
            f"  gate, {name:25s} {spent:8.3f} s   {rate:8.1f} M tokens/s   loop / gate "
            f"{loop / spent:5.1f} x"
        )
    print(f"  per-sample loop                 {loop:8.3f} s   [at least 5 x]")
    print(
        f"  added memory                    {added / 2**20:8.1f} MiB = {added / token_bytes:.2f} "
        "of the token bytes"
    )
    print(
        f"  share of a 60 s iteration: loop {100 * loop / 60:.1f} %, gate {100 * seconds / 60:.2f} "
        "%"
    )
    if seconds >= 3:
        broken.append(f"{seconds:.2f} s, the limit is 3 s")
    if loop < 5 * seconds:
        broken.append(f"only {loop / seconds:.1f} x faster than the loop, the limit is 5 x")
    if added >= 0.5 * token_bytes:
        broken.append(
            f"added memory is {added / token_bytes:.2f} of the token bytes, the limit is 0.5"
        )
    return broken


def bench_decode(count: int, length: int) -> list[str]:
    """Text from tokens with every check, next to the tokenizer's bare batch_decode of
    the same ids.
    """
    tokenizer = load_tokenizer()
    samples = make_samples(count, length, vocabulary=len(tokenizer))
    config = GateConfig(rewards_expected=True, text_source="tokens")
    ids = [sample.tokens[100:] for sample in samples]
    bare, gate = [], []
    for _ in range(3):  # alternating, so that a slow moment of the machine hits both
        bare.append(best_of(lambda: _bare_decode(tokenizer, ids), repeats=1))
        gate.append(
            best_of(
                lambda: postprocess_output_data(samples, config, tokenizer=Codec(tokenizer)),
                repeats=1,
            )
        )
    result = postprocess_output_data(samples, config, tokenizer=Codec(tokenizer))
    decoded = result.statistics.counts["decoded"] * length
    bare_per_token, gate_per_token = min(bare) / (count * length), min(gate) / decoded
    overhead = gate_per_token / bare_per_token - 1
    print(f"{count} x {length} tokens with decoding:")
    print(f"  bare batch_decode   {1e9 * bare_per_token:8.1f} ns per token")
    print(
        f"  gate                {1e9 * gate_per_token:8.1f} ns per decoded token   overhead "
        f"{100 * overhead:+.1f} %"
    )
    return (
        [f"decoding overhead is {100 * overhead:.1f} %, the limit is 20 %"]
        if overhead >= 0.2
        else []
    )


def _bare_decode(tokenizer, ids: list[list[int]]) -> list[str]:
    """What any caller writes: the tokenizer's own batch_decode."""
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def bench_million(count: int, length: int) -> list[str]:
    """One call over a million samples: linear time, bounded memory. Arrays: lists of so many
    numbers alone exceed the limit.
    """
    times = []
    for size in (count // 4, count):
        samples = make_samples(size, length, kind="array")
        start = time.process_time()
        result = postprocess_output_data(samples, CONFIG)
        times.append(time.process_time() - start)
        del result, samples
        gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{count} x {length} tokens in one call: {times[1]:.1f} s ({times[1] / times[0]:.2f} x the "
        f"time of a quarter), peak {peak / 2**30:.1f} GiB"
    )
    broken = []
    if peak >= 16 * 2**30:
        broken.append(f"peak memory is {peak / 2**30:.1f} GiB, the limit is 16 GiB")
    if times[1] / times[0] > 6:
        broken.append(f"four times the samples take {times[1] / times[0]:.1f} times as long")
    return broken


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--million", action="store_true")
    args = parser.parse_args(argv)
    broken = [
        *bench_checks(args.samples, args.length),
        *bench_decode(max(1, args.samples // 8), args.length),
    ]
    if args.million:
        broken += bench_million(1_000_000, 200)
    for line in broken:
        print(f"LIMIT BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
