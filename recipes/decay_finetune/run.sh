#!/usr/bin/env bash
# A pretrained softmax language model becomes recurrent: Mao 2022 (arXiv 2210.04243). Takes a model, puts each of rows.yaml in
# the place of its attention, fine-tunes, and writes perplexities of source, converted and fine-tuned models into one table.
# --corpus peps, whose source it trains, takes about an hour on a core (--data FOLDER: train, valid and test as .txt or .txt.gz;
# a trial of minutes: --source-updates 20 --rows softmax decay_m4 --max-update 4 --warmup-updates 1 --lines 50). wikitext103:
# --model adaptive_lm_wiki103.v2/model.pt --data FOLDER with wiki.*.tokens; gpt2: --model FOLDER with config.json,
# model.safetensors and vocab.json, merges.txt, --data FOLDER of raw text, a line <|endoftext|> between two documents.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe conversion --text peps --merges 8000 -- "$@"
