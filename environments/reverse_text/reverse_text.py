"""Reverse a short pseudo-word.

A task is one text of 4 to 8 characters, made of consonant/vowel syllables joined by spaces now and then, such as
`toma li`. The policy answers with the text reversed. The reward is a similarity in [0, 1], not a hit or a miss, so a
tiny model gets a gradient from its first rollout.

Train and held-out texts are disjoint by construction: one shuffled list of unique texts is cut in two.
"""

import random
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import verifiers as vf
    from datasets import Dataset

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
MIN_CHARS, MAX_CHARS = 4, 8
# Texts are drawn until enough distinct ones exist. The space holds millions, so this bound only catches a request
# for more tasks than there are.
MAX_DRAWS_PER_TASK = 200


def make_text(rng: random.Random) -> str:
    """Draw one text: syllables with a space between some of them, cut to a length of 4 to 8 characters."""
    length = rng.randint(MIN_CHARS, MAX_CHARS)
    text = ""
    while len(text) < length:
        if text and text[-1] != " " and rng.random() < 0.25:
            text += " "
        text += rng.choice(CONSONANTS) + rng.choice(VOWELS)
    # A trailing space would be lost where a chat template strips, so the reversed text must not begin with one.
    return text[:length].strip().ljust(MIN_CHARS, "a")


def make_texts(num_texts: int, seed: int) -> list[str]:
    """Draw `num_texts` distinct texts; a pure function of the seed."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    for _ in range(MAX_DRAWS_PER_TASK * max(num_texts, 1)):
        if len(texts) >= num_texts:
            break
        texts[make_text(rng)] = None
    if len(texts) < num_texts:
        raise ValueError(f"reverse-text: only {len(texts)} distinct texts for seed {seed}, {num_texts} were asked for")
    return list(texts)


def reverse_similarity(completion: list[Any], answer: str) -> float:
    """Similarity of the reply to the reversed text, in [0, 1]; only whitespace at the end of the reply is ignored."""
    reply = completion[-1].get("content") if completion else ""
    return SequenceMatcher(None, (reply or "").rstrip(), answer, autojunk=False).ratio()


def load_environment(num_train: int = 2000, num_eval: int = 64, seed: int = 0) -> "vf.Environment":
    """Build the environment.

    Args:
        num_train: Tasks to train on.
        num_eval: Held-out tasks, disjoint from the training tasks.
        seed: Which texts; the same seed always gives the same tasks in the same order.
    """
    if num_train < 1 or num_eval < 1:
        raise ValueError(f"reverse-text: num_train and num_eval must be at least 1, got {num_train} and {num_eval}")
    # Imported here because they take seconds, and those who only want the texts do without them.
    import verifiers as vf
    from datasets import Dataset

    def build(texts: list[str]) -> "Dataset":
        return Dataset.from_list([{"question": text, "answer": text[::-1]} for text in texts])

    # Held-out texts come first: their set then does not change when num_train does.
    texts = make_texts(num_eval + num_train, seed)
    return vf.SingleTurnEnv(
        dataset=build(texts[num_eval:]),
        eval_dataset=build(texts[:num_eval]),
        rubric=vf.Rubric(funcs=[reverse_similarity]),
    )
