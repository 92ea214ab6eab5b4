#!/usr/bin/env bash
# Transformers: two skip_special_tokens of one tokenizer disagree, and all_special_ids leaves special tokens out.
#
# Guess, written down before the run: all_special_ids holds every token that decode(skip_special_tokens=True) leaves out.
# Versions: transformers 5.23.0, tokenizers 0.23.3.
# Behaviour: a token that tokenizer.json marks special=True, without a role such as eos_token, is special for the backend:
#   decode leaves it out and added_tokens_decoder says special. all_special_ids does not have it, and what asks
#   all_special_ids keeps it: convert_ids_to_tokens(skip_special_tokens=True), get_special_tokens_mask. So it is before and
#   after save_pretrained and AutoTokenizer.from_pretrained. Named in extra_special_tokens it is special everywhere.
# Output (<eos> is eos_token and 3, <eom> is only special in the backend and 4; the ids are those of "a <eom> b <eos>"):
#   made: <eom> is special for added_tokens_decoder, decode
#   saved and loaded: <eom> is special for added_tokens_decoder, decode
#   named in extra_special_tokens: <eom> is special for added_tokens_decoder, decode, all_special_ids, convert_ids_to_tokens,
#     get_special_tokens_mask
# Needs python3 >= 3.10, a download of about 50 MB, no GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" -W ignore - <<'EOF'
import sys
from importlib.metadata import version

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print(", ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers")))
EOS, EOM = 3, 4


def look(label, tokenizer):
    """Whether <eom> is special for each of the four that have a say."""
    ids = tokenizer("a <eom> b <eos>", add_special_tokens=False).input_ids
    assert ids == [1, EOM, 2, EOS], ids
    says = {
        "added_tokens_decoder": tokenizer.added_tokens_decoder[EOM].special,
        "decode": "<eom>" not in tokenizer.decode(ids, skip_special_tokens=True),
        "all_special_ids": EOM in tokenizer.all_special_ids,
        "convert_ids_to_tokens": "<eom>" not in tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True),
        "get_special_tokens_mask": bool(tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)[1]),
    }
    print(f"{label}: <eom> is special for", ", ".join(name for name, special in says.items() if special))
    return list(says.values())


backend = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
backend.pre_tokenizer = WhitespaceSplit()
backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<eos>", "<eom>")])
roles = dict(eos_token="<eos>", unk_token="[UNK]")
made = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
made.save_pretrained("plain")
PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=["<eom>"], **roles).save_pretrained("named")
split = [True, True, False, False, False]
as_stated = look("made", made) == split
as_stated &= look("saved and loaded", AutoTokenizer.from_pretrained("plain")) == split
as_stated &= all(look("named in extra_special_tokens", AutoTokenizer.from_pretrained("named")))
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
