"""A kind of object that is made up: all that a new one needs is this declaration and this codec."""

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.runlog.catalogue import DENSE, HEADER, KeptAs, ObjectKind

RECIPE = ObjectKind(
    name="recipe",
    key="recipes/{number:08d}.json",
    codec="millrace_testing.runlog.recipes:decode_recipe",
    numbering=DENSE,
    finding="RECIPE",
    named_by=(HEADER,),
    kept=KeptAs.RUN,
)


def encode_recipe(steps: list[int]) -> bytes:
    return b'{"steps":%a}' % steps


def decode_recipe(data: bytes, *, where: str) -> list[int]:
    steps = decode_object(data, what=where, reason="RECIPE_CORRUPT").get("steps")
    if not isinstance(steps, list) or not all(type(step) is int for step in steps):
        raise CorruptObjectError(f"{where} is no recipe", reason="RECIPE_CORRUPT")
    return steps
