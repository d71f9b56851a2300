#!/usr/bin/env bash
# WMT14 English to German: the translation models of Schlag et al. 2021 (arXiv 2102.11174), Tables 1 and 6. See README.md.
#
#   bash recipes/wmt14_en_de/run.sh prepare [--data FOLDER [--any-text]] [--out FOLDER]
#   bash recipes/wmt14_en_de/run.sh train --conf conf/NAME.yaml [--data ...] [--out FOLDER] [flags for fairseq-train]
#   bash recipes/wmt14_en_de/run.sh eval --conf conf/NAME.yaml [--out FOLDER] [--average N] [--test PREFIX]
#                                                                               [flags for fairseq-generate]
#
# --data FOLDER   the raw corpora, or the public tokenised set (train.tok.clean.bpe.32000.en, ...); without it: download
# --any-text      FOLDER has train, valid and test .en and .de of another text, or corpora of another size
# --out FOLDER    where everything goes (runs/wmt14_en_de)
# --average N     the mean of the last N checkpoints in place of the best one
# --test PREFIX   in place of valid and test, raw text of one's own: PREFIX.en and PREFIX.de
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" -- "$@"
# shellcheck source=recipes/mt_common.sh
. "$here/../mt_common.sh"

data='' conf='' average='' kind='' test=''
out=$root/runs/wmt14_en_de
merges=32000
words=(--nwordssrc 32768 --nwordstgt 32768)
beam=(--beam 4 --lenpen 0.6)
generate=()
# Name, SHA-256, page and files of each archive; the checksums are those of TensorFlow Datasets.
archives=(
  "training-parallel-europarl-v7.tgz 0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7 www.statmt.org/wmt13 *.de-en.??"
  "training-parallel-commoncrawl.tgz c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5 www.statmt.org/wmt13 *.de-en.??"
  "training-parallel-nc-v9.tgz cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485 www.statmt.org/wmt14 *.de-en.??"
  "dev.tgz 7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7 data.statmt.org/wmt19/translation-task *newstest201[34]*"
)
train_names=(europarl-v7.de-en commoncrawl.de-en news-commentary-v9.de-en)

download() { # download FOLDER
  local archive name sum page files
  for archive in "${archives[@]}"; do
    read -r name sum page files <<<"$archive"
    run python "$tools/fetch.py" "$1/$name" "$sum" "https://$page/$name" "http://$page/$name" \
      "https://web.archive.org/web/2023id_/http://$page/$name"
    run tar -xzf "$1/$name" -C "$1" --wildcards "$files"
  done
}

locate() { # locate FOLDER NAME: the path of NAME.en and NAME.de without their endings
  local file
  file=$(find "$1" -maxdepth 3 \( -name "$2.$source" -o -name "$2.$source.gz" \) -print -quit)
  [ -n "$file" ] || die "there is no $2.$source below $1: give a folder that has it, or leave out --data to download it."
  file=${file%.gz}
  echo "${file%."$source"}"
}

from_sgm() { # from_sgm FOLDER NAME OUT: plain text of NAME-*src.en.sgm and NAME-*ref.de.sgm, if the former is below FOLDER
  local side file
  for side in "src.$source" "ref.$target"; do
    file=$(find "$1" -maxdepth 3 \( -name "$2-deen-$side.sgm" -o -name "$2-$side.sgm" \) -print -quit)
    [ -z "$file" ] || sed -n 's/^<seg[^>]*> *\(.*[^ ]\) *<\/seg>.*/\1/p' "$file" >"$3/$2.${side#*.}"
  done
}

corpus() { # corpus FOLDER OUT
  local folder=$1 split name prefixes pairs tokenized=()
  if [ -z "$folder" ]; then
    folder=$out/download
    download "$folder"
  fi
  mkdir -p "$2/raw"
  for split in train valid test; do
    case $split in
      train) prefixes=("${train_names[@]}") pairs=4520620 name=train.tok.clean.bpe.32000 ;;
      valid) prefixes=(newstest2013) pairs=3000 name=newstest2013.tok.bpe.32000 ;;
      test) prefixes=(newstest2014) pairs=3003 name=newstest2014.tok.bpe.32000 ;;
    esac
    pairs=(--pairs "$pairs")
    if [ -e "$folder/train.tok.clean.bpe.32000.$source" ]; then # it was cleaned: fewer pairs, and no empty ones
      [ -z "$kind" ] && [ $split != train ] || pairs=()
      run python "$tools/mt_text.py" copy "$2/bpe/$split" $source $target "$folder/$name" "${pairs[@]}"
      [ $split = train ] || [ ! -e "$folder/${prefixes[0]}.$target" ] ||
        run python "$tools/mt_text.py" copy "$2/text/$split" $source $target "$folder/${prefixes[0]}" "${pairs[@]}"
      continue
    fi
    if [ -n "$kind" ]; then
      pairs=()
      [ ! -e "$folder/$split.$source" ] && [ ! -e "$folder/$split.$source.gz" ] || prefixes=("$split")
    fi
    for name in "${!prefixes[@]}"; do
      from_sgm "$folder" "${prefixes[name]}" "$2/raw"
      if [ -e "$2/raw/${prefixes[name]}.$source" ]; then
        prefixes[name]=$2/raw/${prefixes[name]}
      else
        prefixes[name]=$(locate "$folder" "${prefixes[name]}")
      fi
    done
    [ $split != train ] || tokenized=(--max-words 80)
    run python "$tools/mt_text.py" tokenize "$2/tok/$split" $source $target "${prefixes[@]}" "${tokenized[@]}" "${pairs[@]}"
    tokenized=()
    [ $split = train ] || run python "$tools/mt_text.py" copy "$2/text/$split" $source $target "${prefixes[@]}"
  done
}

evaluate() { # evaluate NAME
  local split splits="valid test" checkpoint="$out/$1/checkpoint_best.pt" label
  label=$(label "${extra[@]}")
  [ -e "$out/$1/trained" ] || die "$1 is not trained: run the stage train first."
  if [ -n "$average" ]; then
    checkpoint=$out/$1/average_$average.pt
    [ -e "$checkpoint" ] || run python "$tools/mt_average.py" "$out/$1" "$average" "$checkpoint"
    label="average of $average${label:+ $label}"
  fi
  generate=("${extra[@]}")
  if [ -n "$test" ]; then
    splits=own_$(basename -- "$test")
    own_test "$test" "$splits"
  fi
  for split in $splits; do translate "$1" "$split" "$checkpoint" "$label"; done
}

stage=${1:-}
case $stage in
  prepare | train | eval) shift ;;
  *) die "there is no stage '$stage': it is prepare, train or eval." ;;
esac
arguments=()
for argument in "$@"; do
  if [ "$argument" = --any-text ]; then kind="any text"; else arguments+=("$argument"); fi
done
read_flags "--conf --average --test" "${arguments[@]}"
[ -z "$kind" ] || [ -n "$data" ] || die "--any-text says what --data FOLDER holds: give that too."
check_test
[ "$stage" != train ] || find_conf # before any work
if [ "$stage" != eval ]; then prepare; fi
[ "$stage" != prepare ] || { echo "The data is in $out/data."; next train --conf conf/NAME.yaml --out "$out"; exit; }
[ -d "$out/data" ] || die "there is no $out/data: run the stage prepare first."
find_conf
name=$(basename "$conf" .yaml)
case $stage in
  train)
    extra=(--keep-interval-updates 10 "${extra[@]}") # for an average
    train "$name" "$conf"
    next eval --conf "$conf" --out "$out" ;;
  eval) evaluate "$name" ;;
esac
