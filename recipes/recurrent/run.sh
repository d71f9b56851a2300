#!/usr/bin/env bash
# A pretrained softmax language model of yours becomes recurrent, within a given time, and a table says what it has lost.
#   --model FOLDER  as published for transformers: config.json with model.safetensors or pytorch_model.bin
#   --data FOLDER   train.txt, valid.txt and test.txt (or .txt.gz). With --lines each line is a sequence of its own, such as a
#                   sentence or a protein. Without it the text is one stream; a line <|endoftext|> separates two documents.
# The text is what the model's tokenizer.json (or vocab.json and merges.txt) splits. If the folder has a vocab.txt, or with
# --vocabulary FILE, it is names of tokens between spaces. Otherwise it is numbers of tokens.
# Steps: conversion, score of the source, fine-tuning of the softmax model (used if it gains 1 %), fast weights in place of
# softmax, three stages of training, and a folder for fairseq_fwp.load.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" tokenizers -- "$@"
recipe recurrent -- "$@"
