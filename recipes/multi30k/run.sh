#!/usr/bin/env bash
# Small translation models of one size on Multi30k, English to German (29,000 pairs): softmax attention, and linear attention
# with each map of Schlag et al. 2021, Table 1, in all attentions or (self_*) in all but that to the source. 10 to 20 minutes
# a model on one core; what is done is not done again.
# --data FOLDER: raw {train,val,test_2016_flickr}.{en,de}, or the same .gz; without it they are downloaded.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" -- "$@"
recipe translation --pairs multi30k --merges 4000 --search "--beam 5" \
  --models softmax sum favor dpfp delta delta_dpfp self_sum self_favor self_dpfp -- "$@"
