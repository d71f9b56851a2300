#!/usr/bin/env bash
# Fast weight layers (Clark et al. 2022) compared with dynamic evaluation, on the Python Enhancement Proposals (PEPs).
# There are two small base models: local attention, which reads blocks, and Transformer-XL, which reads segments.
# First local/base and xl/base are trained. The other models add a layer to these. About two hours on one core.
# --data FOLDER: as in recipes/peps.
# A trial of a few minutes: --lines 50 --max-update 20 --out runs/fwl_trial
# Speeds are in files "speed *.json". To measure them again on a quiet machine, remove these files and run evaluate.
# The paper's models on WikiText-103 are conf/wt103/*.yaml, for recipes/wikitext103/run.sh. Each file has its command.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe fast-weight-layer --text peps --merges 8000 --models local xl -- "$@"
