#!/usr/bin/env bash
# Small translation models of one size on Multi30k, English to German (29,000 pairs). One model has softmax attention.
# The others have linear attention with the maps of Schlag et al. 2021, Table 1: in all attentions, or (self_*) in all
# except the attention to the source. A model takes 10 to 20 minutes on one core.
# --data FOLDER contains raw {train,val,test_2016_flickr}.{en,de}, or .gz. Without --data they are downloaded.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" -- "$@"
recipe translation --pairs multi30k --merges 4000 --search "--beam 5" \
  --models softmax sum favor dpfp delta delta_dpfp self_sum self_favor self_dpfp -- "$@"
