"""TRL's GRPOTrainer on the tasks of our demo; `against_trl.py` starts it in an environment that has TRL.

Same weights, tasks, chat template, reward functions, batch (16 tasks of 16 rollouts), sampling, optimizer, advantages
(no deviation) and aggregation (mean over the batch's tokens) as examples/reverse_text/rl.toml; one update per batch, no
reference model. TRL samples with `generate` of transformers and takes turns with training. Latency is that of an async
reward function, which TRL awaits for all rollouts of a batch at once; a plain function would wait for one after the
other. The environment of two turns is TRL's `rollout_func`. One line of JSON per step, and a last one with the
evaluations.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

NUM_TRAIN, NUM_EVAL, EVAL_ROLLOUTS = 2000, 64, 4
TASKS, ROLLOUTS = 16, 16
MAX_TOKENS = 12
Messages = list[dict[str, str]]


class Sampler:
    """Samples replies as the trainer does, in batches of left-padded rows."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self._tokenizer = tokenizer

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to where the reply begins."""
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, token_ids: Sequence[int]) -> str:
        """A reply's text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @torch.no_grad()
    def replies(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """A reply to each, with its end of turn if it has one."""
        rows = self._tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")
        was_training = self.model.training
        self.model.eval()
        found = self.model.generate(
            **rows, max_new_tokens=MAX_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True
        )[:, rows["input_ids"].shape[1] :]
        self.model.train(was_training)
        end = self._tokenizer.eos_token_id
        return [row[: row.index(end) + 1] if end in row else row for row in found.tolist()]

    def ended(self, reply: Sequence[int]) -> list[int]:
        """A reply with what the demo's template writes behind it: the end of the turn and a line break."""
        end = [] if reply[-1] == self._tokenizer.eos_token_id else [self._tokenizer.eos_token_id]
        return [*reply, *end, *self._tokenizer("\n", add_special_tokens=False)["input_ids"]]


class OneTurn:
    """The demo's environment, with or without latency."""

    def __init__(self, latency_s: float) -> None:
        from reverse_text import make_texts, reverse_similarity

        self._latency_s, self._similarity = latency_s, reverse_similarity
        rows = [
            {"prompt": [{"role": "user", "content": text}], "answer": text[::-1]}
            for text in make_texts(NUM_EVAL + NUM_TRAIN, 0)
        ]
        self.held_out, self.train = rows[:NUM_EVAL], rows[NUM_EVAL:]
        self.rollout_func = None

    def reward_func(self) -> Callable[..., Any]:
        """What the trainer calls with a batch."""
        if self._latency_s:

            async def late_reward(completions: list[Messages], answer: list[str], **_: Any) -> list[float]:
                async def one(completion: Messages, text: str) -> float:
                    await asyncio.sleep(self._latency_s)
                    return self._similarity(completion, text)

                return await asyncio.gather(*map(one, completions, answer))

            return late_reward

        def reward(completions: list[Messages], answer: list[str], **_: Any) -> list[float]:
            return [self._similarity(completion, text) for completion, text in zip(completions, answer, strict=True)]

        return reward

    def evaluate(self, sampler: Sampler) -> float:
        """Mean reward of the held-out tasks."""
        rows = [row for row in self.held_out for _ in range(EVAL_ROLLOUTS)]
        replies = sampler.replies([sampler.prompt_ids(row["prompt"]) for row in rows])
        scores = [
            self._similarity([{"role": "assistant", "content": sampler.text(reply)}], row["answer"])
            for reply, row in zip(replies, rows, strict=True)
        ]
        return sum(scores) / len(scores)


class TwoTurns:
    """The environment `code_lookup`: its tool answers the first reply, the second ends the rollout."""

    def __init__(self, sampler: Sampler) -> None:
        import code_lookup

        self._env, self._sampler = code_lookup, sampler
        tasks = code_lookup.make_tasks(NUM_EVAL + NUM_TRAIN // 2, 0)
        rows = [
            {"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"], **task["info"]}
            for task in tasks
        ]
        self.held_out, self.train = rows[:NUM_EVAL], rows[NUM_EVAL:]
        self._of_word = {row["prompt"][0]["content"]: row for row in rows}

    def rollout_func(self, prompts: list[Messages], trainer: Any) -> dict[str, Any]:
        """Two turns; tokens of the tool are not learned from."""
        self._sampler.model = trainer.model
        return self.play([self._of_word[prompt[-1]["content"]] for prompt in prompts])

    def play(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Play each row once; ids of prompt and completion, its mask, and the reward."""
        sampler = self._sampler
        prompt_ids = [sampler.prompt_ids(row["prompt"]) for row in rows]
        calls = sampler.replies(prompt_ids)
        texts = [sampler.text(call).strip() for call in calls]
        answers = [
            dict(pair.split("=") for pair in row["codes"].split()).get(text, self._env.UNKNOWN)
            for row, text in zip(rows, texts, strict=True)
        ]
        second = [
            [*sampler.ended(call), *sampler.prompt_ids([{"role": "user", "content": answer}])]
            for call, answer in zip(calls, answers, strict=True)
        ]
        replies = sampler.replies([[*prompt, *more] for prompt, more in zip(prompt_ids, second, strict=True)])
        masks = [
            [1] * len(call) + [0] * (len(more) - len(call)) + [1] * len(reply)
            for call, more, reply in zip(calls, second, replies, strict=True)
        ]
        scores = [
            self._score(row, text, sampler.text(reply)) for row, text, reply in zip(rows, texts, replies, strict=True)
        ]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*more, *reply] for more, reply in zip(second, replies, strict=True)],
            "logprobs": None,
            "env_mask": masks,
            "scores": scores,
        }

    def _score(self, row: Mapping[str, Any], call: str, reply: str) -> float:
        """The environment's rewards with its weights."""
        said = [{"role": "assistant", "content": call}, {"role": "assistant", "content": reply}]
        return 0.5 * self._env.called_tool(said, row) + 0.5 * self._env.repeated_code(said, row["answer"])

    def reward_func(self) -> Callable[..., Any]:
        """What the trainer calls with a batch: the scores are there."""

        def reward(scores: list[float], **_: Any) -> list[float]:
            return scores

        return reward

    def evaluate(self, sampler: Sampler) -> float:
        """Mean reward of the held-out tasks."""
        scores = self.play([row for row in self.held_out for _ in range(EVAL_ROLLOUTS)])["scores"]
        return sum(scores) / len(scores)


class Clock(TrainerCallback):
    """Prints a line per step, with the seconds since the process began."""

    def __init__(self, began: float) -> None:
        self._began = began

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            say(kind="step", step=state.global_step, reward=logs["reward"], at_s=time.perf_counter() - self._began)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(kind="cpu", step=state.global_step, cpu_s=time.process_time(), at_s=time.perf_counter() - self._began)


def say(**fields: Any) -> None:
    """One line of JSON."""
    print(json.dumps(fields), flush=True)


def config_of(output: Path, steps: int) -> Any:
    """The trainer's config: that of examples/reverse_text/rl.toml."""
    return GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        seed=0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
        per_device_train_batch_size=TASKS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch",
        beta=0.0,
        scale_rewards="none",
        loss_type="dapo",
        disable_dropout=True,
        remove_unused_columns=False,
    )


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--task", choices=("one-turn", "two-turns"), default="one-turn")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of every reward")
    parser.add_argument("--environments", type=Path, nargs="+", required=True, help="directories of their modules")
    options = parser.parse_args()
    sys.path[:0] = map(str, options.environments)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    sampler = Sampler(model, tokenizer)
    task = TwoTurns(sampler) if options.task == "two-turns" else OneTurn(options.latency)
    set_seed(0)
    before = task.evaluate(sampler)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=task.reward_func(),
        args=config_of(options.output, options.steps),
        train_dataset=Dataset.from_list(task.train),
        processing_class=tokenizer,
        rollout_func=task.rollout_func,
        callbacks=[Clock(began)],
    )
    trainer.train()
    sampler.model = trainer.model
    say(kind="end", before=before, after=task.evaluate(sampler), trl=trl.__version__)


if __name__ == "__main__":
    main()
