#!/usr/bin/env bash
# A pretrained softmax language model becomes recurrent (Mao 2022, arXiv 2210.04243). Each row of rows.yaml converts the
# attention of a source model to another one, then fine-tunes the model. The result is one table of perplexities.
# Corpora (--corpus):
#   peps         the default: trains its own source model; about an hour on one core
#   wikitext103  --model adaptive_lm_wiki103.v2/model.pt --data FOLDER with wiki.*.tokens
#   gpt2         --model FOLDER with config.json, model.safetensors, vocab.json and merges.txt, --data FOLDER with raw
#                text; a line <|endoftext|> separates two documents. Or a FOLDER with files of the Pile as it is
#                distributed, train/*.jsonl.zst, val.jsonl.zst and test.jsonl.zst (needs pip install zstandard)
# A trial of a few minutes:
#   --source-updates 20 --rows softmax decay_m4 --max-update 4 --warmup-updates 1 --lines 50 --out runs/decay_trial
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe conversion --text peps --merges 8000 -- "$@"
