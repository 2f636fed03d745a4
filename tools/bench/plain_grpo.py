"""The addition example as one plain torch loop in one process: the yardstick for the full stack's
overhead, and where its recipe is tuned.

Same model, data, batch sizes and optimizer steps as `examples/addition`, read from the same two
YAML files; no Ray, no Megatron, no HTTP, no files between generation and training. Prints seconds
per GRPO step, split in generate / log-probs / train, and the accuracy on held-out problems.

    python tools/bench/plain_grpo.py                             # warm-up, then GRPO
    python tools/bench/plain_grpo.py --set grpo.lr=1e-4 --seed 3 # one change, another seed
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from examples.addition import prepare  # noqa: E402

EXAMPLE = ROOT / "examples" / "addition"
# transformers renamed the argument within version 5
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters
    else "past_key_values"
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompt + response rows, right-padded: token_ids [N, P + T], response_mask [N, T] (1 = a
    sampled token), rewards [N].
    """

    token_ids: torch.Tensor
    response_mask: torch.Tensor
    rewards: torch.Tensor


def read_recipe(stage: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the example's YAML for `stage` with `stage.key=value` overrides applied."""
    recipe = yaml.safe_load((EXAMPLE / f"{stage}.yaml").read_text(encoding="utf-8"))
    for override in overrides:
        name, value = override.split("=", 1)
        if name.startswith(stage + "."):
            recipe[name.split(".", 1)[1]] = float(value) if "e-" in value else yaml.safe_load(value)
    return recipe


def render(tokenizer, problems: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns prompt ids [N, P]; every problem has the same number of characters, so nothing is
    padded.
    """
    conversations = [
        [{"role": "user", "content": prepare.question(problem)}] for problem in problems
    ]
    rows = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return torch.tensor(rows)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    *,
    max_tokens: int,
    temperature: float,
    end: int,
    pad: int,
):
    """Returns (response ids [N, T], mask [N, T]) sampled with a KV cache; temperature 0 is greedy.
    The mask includes the end token.
    """
    cache, inputs = DynamicCache(config=model.config), prompts
    running = torch.ones(prompts.shape[0], dtype=torch.bool)
    tokens, masks = [], []
    for _ in range(max_tokens):
        logits = (
            model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            .logits[:, -1]
            .float()
        )
        if temperature == 0:
            sampled = logits.argmax(-1)
        else:
            sampled = torch.multinomial(torch.softmax(logits / temperature, -1), 1).squeeze(1)
        sampled = torch.where(running, sampled, pad)
        tokens.append(sampled)
        masks.append(running)
        running = running & (sampled != end)
        if not running.any():
            break
        inputs = sampled[:, None]
    return torch.stack(tokens, 1), torch.stack(masks, 1)


def score(tokenizer, responses: torch.Tensor, problems: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns rewards [N]: 1.0 where the response, without its end token, is the sum."""
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [
        text == prepare.solution(problem) for text, problem in zip(texts, problems, strict=True)
    ]
    return torch.tensor(right, dtype=torch.float32)


def response_log_probs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Returns log-probs [N, T] of the response tokens at temperature 1."""
    num_response_tokens = batch.response_mask.shape[1]
    logits = model(
        input_ids=batch.token_ids[:, :-1], logits_to_keep=num_response_tokens, use_cache=False
    ).logits.float()
    targets = batch.token_ids[:, -num_response_tokens:]
    return torch.log_softmax(logits, -1).gather(-1, targets[..., None]).squeeze(-1)


def sample_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean over rows of each row's mean over its mask."""
    return (values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)).mean()


def grpo_advantages(rewards: torch.Tensor, group_size: int, *, divide_by_std: bool) -> torch.Tensor:
    """Returns reward - group mean, over (group standard deviation + 1e-6) if asked, [N]; a group's
    rows are neighbours.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6) if divide_by_std else centred).view(-1)


def build_optimizer(
    model: PreTrainedModel, recipe: dict[str, Any]
) -> tuple[torch.optim.Optimizer, Any]:
    """Returns AdamW and its schedule: linear warm-up, then constant, linear or cosine decay to 0
    over `lr_decay_iters`.
    """
    betas = (recipe["adam_beta1"], recipe["adam_beta2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe["lr"], betas=betas, weight_decay=recipe["weight_decay"]
    )
    warmup = recipe.get("lr_warmup_iters") or 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if recipe["lr_decay_style"] == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, recipe["lr_decay_iters"] - warmup))
        return (
            1 - progress
            if recipe["lr_decay_style"] == "linear"
            else 0.5 * (1 + math.cos(math.pi * progress))
        )

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def take_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    loss: torch.Tensor,
    clip: float,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    schedule.step()


def epochs(
    problems: list[tuple[int, int]], size: int, seed: int
) -> Iterator[list[tuple[int, int]]]:
    """Yields batches of `size` problems for ever, each epoch in its own seeded order."""
    queue: list[tuple[int, int]] = []
    epoch = 0
    while True:
        while len(queue) < size:
            order = list(problems)
            random.Random(seed + epoch).shuffle(order)
            queue += order
            epoch += 1
        yield queue[:size]
        queue = queue[size:]


class Loop:
    """One model, one tokenizer, one clock."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.end, self.pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.train_problems, self.eval_problems = prepare.make_problems()

    def evaluate(self) -> float:
        """Returns greedy accuracy on the held-out problems."""
        prompts = render(self.tokenizer, self.eval_problems)
        responses, _ = generate(
            self.model, prompts, max_tokens=5, temperature=0, end=self.end, pad=self.pad
        )
        return score(self.tokenizer, responses, self.eval_problems).mean().item()

    def conversation_batch(self, problems: list[tuple[int, int]]) -> Batch:
        """Returns right responses as a batch, for the warm-up."""
        rows = [
            self.tokenizer(prepare.solution(problem) + prepare.END)["input_ids"]
            for problem in problems
        ]
        width = max(map(len, rows))
        responses = torch.tensor([row + [self.pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
        prompts = render(self.tokenizer, problems)
        return Batch(torch.cat([prompts, responses], 1), mask, torch.zeros(len(problems)))

    def warm_up(self, recipe: dict[str, Any], report_every: int) -> None:
        """Trains on right responses."""
        optimizer, schedule = build_optimizer(self.model, recipe)
        started, size = time.process_time(), recipe["global_batch_size"]
        steps = recipe["num_rollout"] * recipe["rollout_batch_size"] // size
        stream = epochs(self.train_problems, size, recipe["rollout_seed"] + self.seed)
        for step in range(steps):
            batch = self.conversation_batch(next(stream))
            loss = -sample_mean(response_log_probs(self.model, batch), batch.response_mask)
            take_step(self.model, optimizer, schedule, loss, recipe["clip_grad"])
            if (step + 1) % report_every == 0 or step + 1 == steps:
                accuracy = self.evaluate()
                print(f"sft step {step + 1}/{steps} loss {loss.item():.3f} held-out {accuracy:.3f} "
                      f"{time.process_time() - started:.1f} CPU s", flush=True)  # fmt: skip

    def sample(self, recipe: dict[str, Any], problems: list[tuple[int, int]]) -> Batch:
        """Returns n samples of each problem with rewards; a group's rows are neighbours."""
        repeated = [problem for problem in problems for _ in range(recipe["n_samples_per_prompt"])]
        prompts = render(self.tokenizer, problems).repeat_interleave(
            recipe["n_samples_per_prompt"], 0
        )
        limit, temperature = recipe["rollout_max_response_len"], recipe["rollout_temperature"]
        responses, mask = generate(
            self.model,
            prompts,
            max_tokens=limit,
            temperature=temperature,
            end=self.end,
            pad=self.pad,
        )
        missing = limit - responses.shape[1]
        responses = torch.nn.functional.pad(responses, (0, missing), value=self.pad)
        mask = torch.nn.functional.pad(mask, (0, missing), value=False)
        return Batch(
            torch.cat([prompts, responses], 1), mask, score(self.tokenizer, responses, repeated)
        )

    def rollout(
        self, recipe: dict[str, Any], stream: Iterator[list[tuple[int, int]]]
    ) -> tuple[Batch, float]:
        """Returns `rollout_batch_size` groups and the mean reward of all that were sampled.

        With a dynamic sampling filter these are the first groups whose rewards differ, and sampling
        goes on until there are enough.
        """
        size, wanted = recipe["n_samples_per_prompt"], recipe["rollout_batch_size"]
        kept: list[Batch] = []
        rewards: list[torch.Tensor] = []
        while sum(len(batch.rewards) for batch in kept) < wanted * size:
            batch = self.sample(recipe, next(stream))
            rewards.append(batch.rewards)
            if recipe.get("dynamic_sampling_filter_path"):
                rows = (batch.rewards.view(-1, size).std(1) > 1e-6).repeat_interleave(size)
                batch = Batch(batch.token_ids[rows], batch.response_mask[rows], batch.rewards[rows])
            kept.append(batch)
        parts = {
            field.name: torch.cat([getattr(batch, field.name) for batch in kept])[: wanted * size]
            for field in dataclasses.fields(Batch)
        }
        num_columns = int(parts["response_mask"].sum(1).max())
        surplus = parts["response_mask"].shape[1] - num_columns
        parts["token_ids"] = parts["token_ids"][:, : parts["token_ids"].shape[1] - surplus]
        parts["response_mask"] = parts["response_mask"][:, :num_columns]
        return Batch(**parts), torch.cat(rewards).mean().item()

    def train(
        self, recipe: dict[str, Any], batch: Batch, old: torch.Tensor | None, optimizer, schedule
    ) -> None:
        """Takes one optimizer step per `global_batch_size` rows."""
        divide_by_std = recipe.get("grpo_std_normalization", True)
        advantages = grpo_advantages(
            batch.rewards, recipe["n_samples_per_prompt"], divide_by_std=divide_by_std
        )
        size, low = recipe["global_batch_size"], recipe["eps_clip"]
        high = recipe.get("eps_clip_high") or low
        for start in range(0, len(advantages), size):
            rows = slice(start, start + size)
            part = Batch(batch.token_ids[rows], batch.response_mask[rows], batch.rewards[rows])
            log_probs = response_log_probs(self.model, part)
            ratio = (log_probs - (log_probs.detach() if old is None else old[rows])).exp()
            advantage = advantages[rows][:, None]
            loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
            take_step(
                self.model,
                optimizer,
                schedule,
                sample_mean(loss, part.response_mask),
                recipe["clip_grad"],
            )

    def grpo(self, recipe: dict[str, Any], report_every: int) -> dict[str, float]:
        """Runs the recipe's rollouts; returns median seconds per step and of its parts."""
        optimizer, schedule = build_optimizer(self.model, recipe)
        fetch = recipe.get("over_sampling_batch_size") or recipe["rollout_batch_size"]
        stream = epochs(self.train_problems, fetch, recipe["rollout_seed"] + self.seed)
        started, times = time.process_time(), []
        for step in range(recipe["num_rollout"]):
            clock = [time.perf_counter()]
            batch, reward = self.rollout(recipe, stream)
            clock.append(time.perf_counter())
            old = None
            # one step a rollout is on-policy: its ratio is 1
            if recipe["global_batch_size"] < len(batch.rewards):
                with torch.no_grad():
                    old = response_log_probs(self.model, batch)
            clock.append(time.perf_counter())
            self.train(recipe, batch, old, optimizer, schedule)
            clock.append(time.perf_counter())
            parts = [later - earlier for earlier, later in zip(clock[:-1], clock[1:], strict=True)]
            times.append([sum(parts), *parts])
            if (step + 1) % report_every == 0 or step + 1 == recipe["num_rollout"]:
                groups = batch.rewards.view(-1, recipe["n_samples_per_prompt"])
                spread = ((groups.mean(1) > 0) & (groups.mean(1) < 1)).float().mean()
                print(
                    f"grpo step {step + 1}/{recipe['num_rollout']} reward {reward:.3f} "
                    f"spread {spread:.2f} held-out {self.evaluate():.3f} {time.process_time() - started:.1f} CPU s",
                    flush=True,
                )
        steady = torch.tensor(times[min(2, len(times) - 1) :]).median(0).values.tolist()
        return dict(zip(("step_s", "generate_s", "log_probs_s", "train_s"), steady, strict=True))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model",
        type=Path,
        help="HF folder to start from; default: the example's untrained model.",
    )
    parser.add_argument(
        "--stages", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"], help="What to run."
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="STAGE.KEY=VALUE", help="Changes to the recipe."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of sampling and data order.")
    parser.add_argument("--report-every", type=int, default=10, help="Steps between evaluations.")
    parser.add_argument("--save", type=Path, help="Write the trained model as an HF folder.")
    parser.add_argument("--json", type=Path, help="Write the measurements here.")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(options.model or prepare.prepare(Path(scratch)) / "model", options.seed)
    if "sft" in options.stages:
        loop.warm_up(read_recipe("sft", options.set), options.report_every * 4)
    before = loop.evaluate()
    if options.save:
        loop.model.save_pretrained(options.save)
        loop.tokenizer.save_pretrained(options.save)
    if "grpo" not in options.stages:
        return
    times = loop.grpo(read_recipe("grpo", options.set), options.report_every)
    times["accuracy_before"], times["accuracy_after"] = before, loop.evaluate()
    print("plain: " + " ".join(f"{name}={value:.4f}" for name, value in times.items()))
    if options.json:
        options.json.write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()
