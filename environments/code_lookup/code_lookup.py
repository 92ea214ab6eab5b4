"""Two turns and a tool: ask for the code of a word's last letter, then repeat it.

Turn 1 shows a word such as `toma`; the policy calls the tool by writing its last letter, `a`. The tool answers with
the letter's code in this task, such as `ku`. Turn 2: the policy repeats the code. Codes are drawn anew for every
task, so the second half of the reward cannot be had without the tool.

The tool is called in plain text, not by a JSON tool call: it works with every engine, with or without a tool parser,
and with models too small to write JSON.
"""

import random
from difflib import SequenceMatcher
from typing import Any

import verifiers as vf
from datasets import Dataset

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
# What the tool answers when the reply is not a letter of the word.
UNKNOWN = "?"
MAX_DRAWS_PER_TASK = 200


def make_word(rng: random.Random) -> str:
    """Draw one word of two or three syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3)))


def make_codes(word: str, seed: int) -> dict[str, str]:
    """Draw the code of every letter of the word; a pure function of word and seed."""
    rng = random.Random(f"{seed}:{word}")
    return {letter: rng.choice(CONSONANTS) + rng.choice(VOWELS) for letter in sorted(set(word))}


def make_tasks(num_tasks: int, seed: int) -> list[dict[str, Any]]:
    """Make `num_tasks` tasks with distinct words."""
    rng = random.Random(seed)
    words: dict[str, None] = {}
    for _ in range(MAX_DRAWS_PER_TASK * max(num_tasks, 1)):
        if len(words) >= num_tasks:
            break
        words[make_word(rng)] = None
    if len(words) < num_tasks:
        raise ValueError(f"code-lookup: only {len(words)} distinct words for seed {seed}, {num_tasks} were asked for")
    tasks: list[dict[str, Any]] = []
    for word in words:
        codes = make_codes(word, seed)
        # The codes travel as one string, `letter=code` joined by spaces: a table column has one type for all rows.
        info = {"codes": " ".join(f"{letter}={code}" for letter, code in codes.items())}
        tasks.append({"question": word, "answer": codes[word[-1]], "info": info})
    return tasks


def _replies(completion: list[Any]) -> list[str]:
    return [(message.get("content") or "").strip() for message in completion if message.get("role") == "assistant"]


def called_tool(completion: list[Any], state: vf.State) -> float:
    """1 if the first reply is the word's last letter, 1/4 if it is another letter of the word, else 0."""
    replies = _replies(completion)
    call = replies[0] if replies else ""
    word = str(state["prompt"][-1].get("content"))
    if call == word[-1]:
        return 1.0
    return 0.25 if len(call) == 1 and call in word else 0.0


def repeated_code(completion: list[Any], answer: str) -> float:
    """Similarity of the second reply to the right code, in [0, 1]."""
    replies = _replies(completion)
    if len(replies) < 2:
        return 0.0
    return SequenceMatcher(None, replies[1], answer, autojunk=False).ratio()


class CodeLookupEnv(vf.MultiTurnEnv):
    """Answers the first reply with the tool's result; the second reply ends the rollout."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Run the tool on the last reply."""
        codes = dict(pair.split("=") for pair in state["info"]["codes"].split())
        call = str(messages[-1].get("content") or "").strip()
        return [vf.UserMessage(content=codes.get(call, UNKNOWN))]


def load_environment(num_train: int = 1000, num_eval: int = 64, seed: int = 0) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: Tasks to train on.
        num_eval: Held-out tasks, with words that do not occur in training.
        seed: Which words and codes; the same seed always gives the same tasks in the same order.
    """
    if num_train < 1 or num_eval < 1:
        raise ValueError(f"code-lookup: num_train and num_eval must be at least 1, got {num_train} and {num_eval}")
    tasks = make_tasks(num_eval + num_train, seed)
    return CodeLookupEnv(
        dataset=Dataset.from_list(tasks[num_eval:]),
        eval_dataset=Dataset.from_list(tasks[:num_eval]),
        rubric=vf.Rubric(funcs=[called_tool, repeated_code], weights=[0.5, 0.5]),
        max_turns=2,
    )
