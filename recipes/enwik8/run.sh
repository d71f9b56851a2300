#!/usr/bin/env bash
# enwik8, byte by byte: the Transformer-XL models of Dai et al. 2019, one YAML each, with their protocols.
#
#   bash recipes/enwik8/run.sh prepare [--data FOLDER [--any-text]] [--out FOLDER]
#   bash recipes/enwik8/run.sh train --conf conf/base.yaml [--out FOLDER] [flags for fairseq-train]
#   bash recipes/enwik8/run.sh eval --conf conf/base.yaml [--out FOLDER] [flags for fwp-eval-lm]
#
# --data FOLDER   holds the file enwik8, 100,000,000 bytes; without it, it is downloaded. Another file is refused
# --any-text      FOLDER/enwik8 is another file, whose numbers compare with nobody's
# --out FOLDER    where everything goes (runs/enwik8)
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" -- "$@"
# shellcheck source=recipes/lm_corpus.sh
. "$here/../lm_corpus.sh"

data=''
out=$root/runs/enwik8
counts=() # the bytes of each split, and a line end after its last line: see corpus_text

download() { # download FOLDER
  run python "$tools/fetch.py" "$1/enwik8.zip" 547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc \
    http://mattmahoney.net/dc/enwik8.zip https://data.deepai.org/enwik8.zip \
    https://web.archive.org/web/2022id_/http://mattmahoney.net/dc/enwik8.zip
  run python -m zipfile -e "$1/enwik8.zip" "$1"
}

corpus_text() { # corpus_text FOLDER OUT
  local found check=(--sha256 2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8)
  [ -z "$any_text" ] || check=()
  found=$(run python "$here/bytes.py" "$1/enwik8" "$2" "${check[@]}")
  read -ra counts <<<"$found"
}

protocols() { # the public scripts of Dai et al. 2019
  local carry="--carry-state --tokens-per-sample"
  case $1 in
    medium | large) echo $'3800 + 128\t'"$carry 128 --model-overrides {'mem_len':3800,'clamp_len':1000,'same_length':True}" ;;
    *) echo $'2100 + 80\t'"$carry 80 --model-overrides {'mem_len':2100,'clamp_len':820,'same_length':True}" ;;
  esac
}

main "$@"
