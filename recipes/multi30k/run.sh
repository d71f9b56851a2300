#!/usr/bin/env bash
# Small translation models of one size on Multi30k, English to German (29,000 pairs): softmax attention, and linear attention
# with each map of Schlag et al. 2021, Table 1, in all attentions or (self_*) in all but that to the source. 10 to 20 minutes a
# model on one core; what is done is not done again.
#
#   bash recipes/multi30k/run.sh [prepare|train|eval|all] --data FOLDER [--out FOLDER] [--models NAME ...]
#                                                                    [flags for fairseq-train, or in eval for fairseq-generate]
#
# --data FOLDER   raw text: {train,val,test_2016_flickr}.{en,de}, or the same .gz (https://github.com/multi30k/dataset)
# --out FOLDER    where everything goes (runs/multi30k)
# --test PREFIX   with eval: in place of valid and test, raw text of one's own, PREFIX.en and PREFIX.de
# --models ...    which of conf/*.yaml (softmax sum favor dpfp delta delta_dpfp self_sum self_favor self_dpfp)
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" -- "$@"
# shellcheck source=recipes/mt_common.sh
. "$here/../mt_common.sh"

data='' test=''
out=$root/runs/multi30k
merges=4000
known="softmax sum favor dpfp delta delta_dpfp self_sum self_favor self_dpfp"
models=$known
beam=(--beam 5)
generate=()
kind=''

corpus() { # corpus FOLDER OUT
  local split from
  for split in train valid test; do
    case $split in valid) from='val' ;; test) from='test_2016_flickr' ;; *) from=$split ;; esac
    run python "$tools/mt_text.py" tokenize "$2/tok/$split" $source $target "$1/$from"
    [ $split = train ] || run python "$tools/mt_text.py" copy "$2/text/$split" $source $target "$1/$from"
  done
}

stage=all
case ${1:-} in
  prepare | train | eval | all) stage=$1; shift ;;
  [!-]*) die "there is no stage $1: it is prepare, train, eval or all." ;;
esac
read_flags "--models --test" "$@"
check_test
for name in $models; do
  [ "$name" != common ] && [ -f "$here/conf/$name.yaml" ] || die "there is no model $name: they are $known."
done
case $stage in
  prepare | train | all)
    [ -n "$data" ] || [ -d "$out/data" ] || die "give --data FOLDER with {train,val,test_2016_flickr}.{en,de} or the same" \
      ".gz (https://github.com/multi30k/dataset, data/task1/raw)."
    prepare ;;
esac
[ -d "$out/data" ] || die "there is no $out/data: run the stage prepare first."
case $stage in
  prepare) echo "The data is in $out/data."; next train --out "$out" --models "$models" ;;
  train | all) for name in $models; do train "$name" "$here/conf/$name.yaml"; done ;;
esac
[ "$stage" != train ] || next eval --out "$out" --models "$models"
case $stage in
  eval | all)
    if [ "$stage" = eval ]; then generate=("${extra[@]}")
    elif [[ " ${extra[*]} " = *" --cpu "* ]]; then generate=(--cpu); fi
    if [ -n "$test" ]; then
      own=own_$(basename -- "$test")
      own_test "$test" "$own"
      for name in $models; do translate "$name" "$own" "$out/$name/checkpoint_best.pt" ''; done
      exit
    fi
    for name in $models; do
      for split in valid test; do translate "$name" $split "$out/$name/checkpoint_best.pt" ''; done
    done
    # shellcheck disable=SC2086
    run python "$tools/mt_scores.py" csv "$out" $models >"$out/table.csv"
    run python "$tools/mt_scores.py" table "$out/table.csv" >"$out/table.unfinished"
    mv "$out/table.unfinished" "$out/table.md"
    cat "$out/table.md"
    echo "The same is in $out/table.md, its numbers in $out/table.csv." ;;
esac
