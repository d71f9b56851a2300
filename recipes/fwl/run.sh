#!/usr/bin/env bash
# Fast weight layers (Clark et al. 2022) beside dynamic evaluation, on two small models of the Python Enhancement Proposals:
# local attention, read in blocks, and Transformer-XL, read in segments. About two hours on a core; nothing is done twice,
# but speeds, "speed *.json", are worth measuring again on a quiet machine once all else is there: remove them, and evaluate.
# local/base and xl/base are trained first, and the others go on from them with a layer on top. --data FOLDER as in recipes/peps.
# A trial in minutes: --lines 50 --max-update 20 --out runs/fwl_trial. The paper's models, on WikiText-103, are
# conf/wt103/*.yaml for recipes/wikitext103/run.sh; each says how.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe fast-weight-layer --text peps --merges 8000 --models local xl -- "$@"
