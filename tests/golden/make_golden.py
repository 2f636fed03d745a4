"""Makes the golden corpus of the gate: tokenizer.json and samples.jsonl beside this file.
Deterministic; needs no network.

    python tests/golden/make_golden.py            # write samples and the verdicts that the gate
                                                  gives now
    python tests/golden/make_golden.py --check    # exit 1 if the files would change

Every sample carries `intended`, the reason its maker had in mind; the script refuses to write a
verdict that differs from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from support.gate_golden import (  # noqa: E402
    GOLDEN_CONFIG,
    SAMPLES_PATH,
    TOKENIZER_PATH,
    expectation_of,
    load_tokenizer,
)

from slime.data.sample import Sample, Status  # noqa: E402
from slime.gate import postprocess_output_data  # noqa: E402

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    "The capital of France is Paris, and the river through it is the Seine.",
    "Water boils at 100 degrees Celsius at sea level.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Le café est fermé le lundi, mais la bibliothèque reste ouverte.",
    "El niño comió una manzana y después jugó en el jardín.",
    "La città è piena di luce e di musica stasera.",
    "O coração não tem razões que a própria razão desconheça.",
    "Szybki brązowy lis przeskakuje nad leniwym psem.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "Швидка руда лисиця стрибає через лінивого пса.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "敏捷的棕色狐狸跳过了懒狗。",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "날쌘 갈색 여우가 게으른 개를 뛰어넘는다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول.",
    "השועל החום המהיר קופץ מעל הכלב העצלן.",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "দ্রুত বাদামী শিয়াল অলস কুকুরের উপর লাফ দেয়।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "Con cáo nâu nhanh nhẹn nhảy qua con chó lười biếng.",
    "ፈጣኑ ቡናማ ቀበሮ በሰነፉ ውሻ ላይ ዘለለ።",
    "სწრაფი ყავისფერი მელა ხტება ზარმაც ძაღლზე.",
    "Սրընթաց շագանակագույն աղվեսը ցատկում է ծույլ շան վրայով։",
    "Great work 🎉🎉 see you at the 🏖️ with the family 👨‍👩‍👧‍👦!",
    "Flags: 🇫🇷 🇯🇵 🇧🇷; skin tones: 👍🏽 👋🏿; a heart ❤️.",
    "Cafe\u0301 with a combining accent, and ﬁ as a ligature.",
    "math: ∀x ∈ ℝ, x² ≥ 0, so ∫₀¹ x² dx = ⅓ ≈ 0.333",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "```python\nfor i in range(3):\n\tprint(f\"{i=}\")\n```",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name;",
    "#include <stdio.h>\nint main(void) { printf(\"hi\\n\"); return 0; }",
    '{"name": "widget", "price": 9.99, "tags": ["a", "b"], "ok": true}',
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
    "1. First step\n2. Second step\n   - a detail\n3. Done",
    "<p>HTML &amp; entities: &lt;tag&gt;</p>",
]  # fmt: skip
LABELS = ["A", "B", "yes", "no", "正", "7"]
MATH = [
    ("2 + 3", "add the two numbers", "5"),
    ("7 * 8", "seven eights are fifty-six", "56"),
    ("100 - 1", "one less than a hundred", "99"),
    ("平方根 of 81", "九 times 九", "9"),
    ("9 / 3", "three threes make nine", "3"),
    ("the 5th prime", "2, 3, 5, 7, 11", "11"),
    ("12 in binary", "8 + 4", "1100"),
    ("half of 3/4", "multiply by 1/2", "3/8"),
    ("2^10", "doubling ten times", "1024"),
    ("10 mod 3", "three threes and one left", "1"),
]
TOOLS = [
    (
        'I will look it up.\n<tool_call>{"name": "search", "arguments": {"q": "weather '
        'Paris"}}</tool_call>'
    ),
    '<think>two cities</think><tool_call>{"name": "t", "arguments": {"c": "Oslo"}}</tool_call>\n'
    '<tool_call>{"name": "t", "arguments": {"c": "Rome"}}</tool_call>',
    "<think>maybe <tool_call>{}</tool_call> but no need</think>It is sunny.",
    "No tool is needed: the answer is 4.",
]
TURNS = [
    "Let me check.<|im_end|>\n<tool>21 degrees</tool>\nIt is 21 degrees.",
    "First part.<|im_end|>\n<tool>ok</tool>\nSecond part.<|im_end|>\n<tool>done</tool>\nFinished.",
    "Ich frage nach.<|im_end|>\n<tool>{\"tür\": \"zu\"}</tool>\nDie Tür ist zu. 🚪",
    "调用工具。<|im_end|>\n<tool>结果</tool>\n完成。",
]  # fmt: skip


def train_tokenizer() -> None:
    """A byte-level BPE of 700 entries over this file's own texts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = CHAT + TOOLS + TURNS + [" ".join(parts) for parts in MATH]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(tag, normalized=False, special=False) for tag in ("<think>", "</think>")]
    )
    TOKENIZER_PATH.write_text(tokenizer.to_str(pretty=False), encoding="utf-8")


class Corpus:
    """Collects samples. `add` encodes the response, ends it with <|eos|>, and gives every token a
    plausible log-prob.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.rows: list[tuple[str | None, Sample]] = []

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def add(
        self,
        intended,
        text,
        *,
        task="chat",
        prompt=None,
        ids=None,
        response=None,
        eos=True,
        **fields,
    ) -> Sample:
        number = len(self.rows)
        prompt = f"prompt {number // 2}" if prompt is None else prompt
        prompt_ids = self.ids(prompt)
        ids = self.ids(text) + [self.tokenizer.eos_token_id] * eos if ids is None else ids
        values = {
            "index": number,
            "group_index": number // 2,
            "prompt": prompt,
            "tokens": prompt_ids + ids,
            "response": self.tokenizer.decode(ids, skip_special_tokens=True)
            if response is None
            else response,
            "response_length": len(ids),
            "rollout_log_probs": [-0.05 - 0.1 * (i % 7) for i in range(len(ids))],
            "status": Status.COMPLETED,
            "finish_reason": "stop",
            "reward": float(number % 2),
            "metadata": {"source_name": task},
        }
        sample = Sample(**{**values, **fields})
        self.rows.append((intended, sample))
        return sample


def add_valid(corpus: Corpus) -> None:
    for text in CHAT:
        corpus.add(None, text)
    for text in LABELS:
        corpus.add(None, text, task="labels", eos=False)
    for question, thought, answer in MATH:
        corpus.add(
            None,
            f"<think>{thought}</think>\n<answer>{answer}</answer>",
            task="math",
            prompt=f"What is {question}?",
        )
    for text in TOOLS:
        corpus.add(None, text, task="tools")
    for text in TURNS:
        sample = corpus.add(None, text, task="chat")
        sample.loss_mask = [i % 3 != 1 and 1 or 0 for i in range(sample.response_length)]
    corpus.add(None, "Stop strings end here.\nUser:", response="Stop strings end here.", eos=False)
    corpus.add(None, "  outer whitespace is no difference \n")
    corpus.add(None, CHAT[0], prompt=CHAT[1], finish_reason=None)


def add_empty(corpus: Corpus) -> None:
    corpus.add("empty", "", eos=False)
    corpus.add("empty", "   \n\t ")
    for blank in (
        "\u200b\u200b",
        "\ufeff",
        "\u00a0\u2003",
        "\u00ad\u00ad",
        "\ufe0f\ufe0f",
        "\U000e0041\U000e0042",
        "\x00\x07\x1b",
        "\u3164",
    ):
        corpus.add("empty", blank)
    corpus.add("empty", "<|im_end|><|im_end|>")


def add_lengths(corpus: Corpus) -> None:
    for text in ("A", "5", "!", "no", "x", "7", "B", "?"):
        corpus.add("too_short", text, ids=corpus.ids(text)[:1])
    for repeat, text in enumerate(CHAT[:5] + CHAT[9:12]):
        corpus.add("too_long", " ".join([f"{text} {i}." for i in range(6 + repeat)]))
    corpus.add(
        "too_long", "short answer, but the prompt fills the context", prompt=" ".join(CHAT[:6])
    )
    for text in CHAT[10:18]:
        corpus.add(
            "truncated", text[:20], eos=False, status=Status.TRUNCATED, finish_reason="length"
        )
    corpus.add("truncated", CHAT[0], eos=False, finish_reason="length")
    for text in ("ha ", "0", "abc ", "\n", "loop and loop ", "= ", "好", "() "):
        corpus.add(
            "repetitive",
            CHAT[1] + text * 120,
            ids=(corpus.ids(CHAT[1]) + corpus.ids(text) * 120)[:110],
            eos=False,
        )


def add_engine_faults(corpus: Corpus) -> None:
    for text in CHAT[:8]:
        corpus.add("aborted", text[:9], status=Status.ABORTED, finish_reason="abort", eos=False)
        corpus.add("failed", text[:9], status=Status.FAILED, finish_reason=None, eos=False)
    for position, text in enumerate(CHAT[12:20]):
        sample = corpus.add("logprob_mismatch", text)
        if position < 6:
            sample.rollout_log_probs = sample.rollout_log_probs[: position + 1]
        elif position == 6:
            sample.rollout_log_probs = None
        else:
            sample.rollout_log_probs = sample.rollout_log_probs + [-1.0]
    bad = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.5,
        1e9,
        float("nan"),
        0.01,
        -float("inf"),
        None,
    ]
    for position, value in enumerate(bad):
        sample = corpus.add("bad_logprob", CHAT[position])
        sample.rollout_log_probs[position % 5] = value
    for position, value in enumerate(
        [-1, 10**6, len(corpus.tokenizer), -100, 2**31 - 1, 151643, -(2**31), 2**40]
    ):
        sample = corpus.add("bad_token", CHAT[20 + position])
        sample.tokens[-2 if position % 2 else 0] = value
    for value in (
        None,
        float("nan"),
        float("inf"),
        "0.5",
        [1.0],
        {"score": 1.0},
        -float("inf"),
        1j,
        object,
    ):
        corpus.add(
            "bad_reward",
            CHAT[3],
            reward=None
            if value is object
            else repr(value)
            if isinstance(value, complex)
            else value,
        )


def add_misaligned(corpus: Corpus) -> None:
    corpus.add("misaligned", CHAT[0], response=CHAT[0] + "<|im_end|>")
    corpus.add("misaligned", CHAT[2], response="<|bos|>" + CHAT[2])
    corpus.add("misaligned", CHAT[12], response=CHAT[12][:-1])
    corpus.add("misaligned", CHAT[24], response=CHAT[24].replace("🎉🎉", "\ufffd"))
    corpus.add("misaligned", CHAT[28], response=CHAT[28].replace("    ", " "))
    corpus.add("misaligned", CHAT[33], response=CHAT[33].replace("\n", " "))
    corpus.add("misaligned", CHAT[4], response=CHAT[5])
    corpus.add(
        "misaligned", CHAT[9], ids=[i + 1 for i in corpus.ids(CHAT[9])], response=CHAT[9], eos=False
    )
    corpus.add("misaligned", CHAT[6]).response_length = 10**4
    corpus.add("misaligned", CHAT[7]).loss_mask = [1, 1]


def add_bad_format(corpus: Corpus) -> None:
    broken = [
        "<think>2 + 3</think>\n<answer>5",
        "<think>2 + 3\n<answer>5</answer>",
        "the answer is 5",
        "<answer>5</answer><think>2 + 3</think>",
        "</think>2 + 3<think><answer>5</answer>",
        "<think>2 + 3</think><answer><answer>5</answer></answer>",
        "<think>2 + 3 <answer>5</answer></think>",
        "<think>a</think><think>b</think><answer>5</answer>",
        "<think>a</think><answer>5<|im_start|>user</answer>",
        "<think>a</think><answer>5</answer><|im_start|>user\nnext",
    ]
    for text in broken:
        corpus.add("bad_format", text, task="math")
    corpus.add("bad_format", '<tool_call>{"name": "x"}', task="tools")
    corpus.add("bad_format", "</tool_call> then <tool_call>{}", task="tools")


def write_samples() -> None:
    tokenizer = load_tokenizer()
    corpus = Corpus(tokenizer)
    for part in (
        add_valid,
        add_empty,
        add_lengths,
        add_engine_faults,
        add_misaligned,
        add_bad_format,
    ):
        part(corpus)
    for position, word in enumerate(
        (
            "my plug-in said no",
            "toxic",
            "",
            "TRUNCATED",
            "毒性",
            "duplicate of 3",
            None,
            "bad format",
        )
    ):
        corpus.add("rejected", CHAT[position], valid=False, invalid_reason=word)
    samples = [sample for _, sample in corpus.rows]
    result = postprocess_output_data(samples, GOLDEN_CONFIG, tokenizer=tokenizer)
    lines, wrong = [], []
    for (intended, sample), out, verdict in zip(
        corpus.rows, result.samples, result.verdicts, strict=True
    ):
        expected = expectation_of(out, verdict)
        if expected["reason"] != intended:
            wrong.append(
                f"sample {sample.index} {sample.response[:50]!r}: intended {intended}, got "
                f"{expected}"
            )
        lines.append(
            json.dumps(
                {"sample": sample.to_dict(), "expected": expected},
                ensure_ascii=True,
                sort_keys=True,
                separators=(",", ":"),
            )
        )
    if wrong:
        raise SystemExit("The gate does not see what the corpus intends:\n" + "\n".join(wrong))
    SAMPLES_PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    before = [
        path.read_bytes() if path.exists() else b"" for path in (TOKENIZER_PATH, SAMPLES_PATH)
    ]
    train_tokenizer()
    write_samples()
    after = [path.read_bytes() for path in (TOKENIZER_PATH, SAMPLES_PATH)]
    if "--check" not in argv:
        return 0
    for path, old in zip((TOKENIZER_PATH, SAMPLES_PATH), before, strict=True):
        path.write_bytes(old)
    return int(before != after)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
