#!/usr/bin/env bash
# WikiText-103: the models of Schlag et al. 2021, Tables 2 to 5, and of Dai et al. 2019, one YAML each, with their protocols.
#
#   bash recipes/wikitext103/run.sh prepare [--data FOLDER [--any-text]] [--out FOLDER]
#   bash recipes/wikitext103/run.sh train --conf conf/small/delta.yaml [--out FOLDER] [flags for fairseq-train]
#   bash recipes/wikitext103/run.sh eval --conf conf/small/delta.yaml [--out FOLDER] [flags for fwp-eval-lm]
#
# --data FOLDER   holds wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or train.txt, ...) of WikiText-103; without
#                 it they are downloaded. Its tokens are counted, and another text is refused
# --any-text      FOLDER holds another text, whose numbers compare with nobody's
# --out FOLDER    where everything goes (runs/wikitext103)
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" -- "$@"
# shellcheck source=recipes/lm_corpus.sh
. "$here/../lm_corpus.sh"

data=''
out=$root/runs/wikitext103
counts=(train=103227021 valid=217646 test=245569 vocabulary=267735)

download() { # download FOLDER; the checksum is that of the archive which Salesforce Research published
  local path=wikitext/wikitext-103-v1.zip
  run python "$tools/fetch.py" "$1/wikitext-103-v1.zip" 242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590 \
    https://wikitext.smerity.com/wikitext-103-v1.zip "https://s3.amazonaws.com/research.metamind.io/$path" \
    "https://web.archive.org/web/2022id_/https://s3.amazonaws.com/research.metamind.io/$path"
  run python -m zipfile -e "$1/wikitext-103-v1.zip" "$1"
  mv "$1"/wikitext-103/wiki.*.tokens "$1"
}

corpus_text() { # corpus_text FOLDER OUT
  [ -z "$any_text" ] || counts=()
  local split file
  for split in train valid test; do
    file=$1/wiki.$split.tokens
    [ -f "$file" ] || file=$1/$split.txt
    [ -f "$file" ] || die "$1 has neither wiki.$split.tokens nor $split.txt: give a folder that has WikiText-103."
    cp "$file" "$2/$split.txt"
  done
}

protocols() { # Schlag et al. 2021, Sec. 6.3 and App. F; the public scripts of Dai et al. 2019, and its Table 6
  local carry="--carry-state --tokens-per-sample" length
  case $1 in
    carried/xl)
      echo $'15 + 1\t'"$carry 1 --model-overrides {'mem_len':15}"
      echo $'64 + 64\t'"$carry 64 --model-overrides {'mem_len':64}"
      echo $'128 + 128\t'"$carry 128 --model-overrides {'mem_len':128}"
      echo $'384 + 384\t'"$carry 384 --model-overrides {'mem_len':384,'clamp_len':384}" ;;
    carried/*) echo $'carried\t--carry-state' ;;
    xl/base) echo $'640 + 64\t'"$carry 64 --model-overrides {'mem_len':640,'clamp_len':400,'same_length':True}" ;;
    xl/large) echo $'1600 + 128\t'"$carry 128 --model-overrides {'mem_len':1600,'clamp_len':1000,'same_length':True}" ;;
    ablation/recurrent* | ablation/standard) # with equal lengths the memory is what a token attends to
      echo $'init\t--carry-state'
      for length in 120 160 200 256 300 340 380 420 450 460 500 540 580 640; do
        echo "attention $length"$'\t'"--carry-state --model-overrides {'mem_len':$length,'same_length':True}"
      done ;;
    ablation/*)
      echo $'init\t--stride 1'
      for length in 60 80 100 120 140 160 200 260 300; do
        if [ "$1" = ablation/layerwise_half ] && [ "$length" -gt 128 ]; then break; fi # no position was learned
        echo "attention $length"$'\t'"--stride 1 --tokens-per-sample $length --model-overrides {'max_target_positions':$length}"
      done ;;
    *) echo $'window\t--stride 1' ;;
  esac
}

main "$@"
