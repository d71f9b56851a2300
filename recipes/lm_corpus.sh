# Prepares a public corpus, and trains and evaluates one model on it; sourced by wikitext103/ and enwik8/run.sh, which set
# here, root, data (empty: download), out, counts (what lm_counts.py expects of the corpus), and the functions
# download FOLDER, corpus_text FOLDER OUT, which writes train.txt, valid.txt and test.txt and may set counts, and protocols
# NAME, which prints lines "LABEL<tab>flags of fwp-eval-lm".
# shellcheck shell=bash disable=SC2034,SC2154

# shellcheck source=recipes/lm_common.sh
. "$root/recipes/lm_common.sh"

task=()

read_arguments() {
  stage=${1:-} conf='' any_text='' extra=()
  case $stage in
    prepare | train | eval) shift ;;
    *) die "there is no stage '$stage': it is prepare, train or eval." ;;
  esac
  while [ $# -gt 0 ]; do
    case $1 in
      --data | --out | --conf)
        [ -n "${2:-}" ] || die "$1 needs a value."
        printf -v "${1#--}" %s "$2"
        shift 2 ;;
      --data=* | --out=* | --conf=*) die "write ${1%%=*} and its value as two words." ;;
      --any-text) any_text=1; shift ;;
      --save-dir) die "--save-dir is set by the recipe (--out): leave it out." ;;
      *) extra+=("$1"); shift ;;
    esac
  done
  [ -z "$any_text" ] || [ -n "$data" ] || die "--any-text says what --data FOLDER holds: give that too."
  [ -z "$data" ] || [ -d "$data" ] || die "there is no folder $data."
  # A name like -x would be taken for an option by what it is passed to.
  [[ $out = /* ]] || out=$PWD/$out
  [[ -z $data || $data = /* ]] || data=$PWD/$data
  text=$out/data/text
}

prepare() {
  local work=$out/data.unfinished from=$out/download source="the corpus"
  [ -z "$any_text" ] || source="any text of $data"
  if [ -d "$out/data" ]; then
    [ -z "$data" ] || check_same "$out/data/source.txt" "$source"
    return
  fi
  rm -rf "$work"
  mkdir -p "$work/text"
  if [ -n "$data" ]; then from=$data; else download "$from"; fi
  corpus_text "$from" "$work/text"
  run_to "$work/preprocess.log" fairseq-preprocess --only-source --trainpref "$work/text/train.txt" \
    --validpref "$work/text/valid.txt" --testpref "$work/text/test.txt" --destdir "$work/bin" --workers "$(nproc)" ||
    die "fairseq-preprocess failed: see $work/preprocess.log."
  run python "$tools/lm_counts.py" "$work/bin" "${counts[@]}"
  rm "$work/text/train.txt"
  echo "$source" >"$work/source.txt"
  mv "$work" "$out/data" # only now does it count
}

# The protocols of the row, for valid and test, with the flags of the command line; one of a protocol's replaces them.
evaluate() { # evaluate NAME
  local split protocol flags found flag own name
  own=$(label "${extra[@]}")
  found=$(protocols "$1")
  for flag in "${extra[@]}"; do
    case ${flag%%=*} in
      --stride | --tokens-per-sample | --context-window | --carry-state | --model-overrides)
        echo "${flag%%=*} replaces the protocol of $1: ${found//*$'\t'/}"
        found=$'\t'
        break ;;
    esac
  done
  mapfile -t found <<<"$found"
  for protocol in "${found[@]}"; do
    read -ra flags <<<"${protocol#*$'\t'}"
    name="${protocol%%$'\t'*} $own"
    name=${name# }
    for split in valid test; do
      score "$1" "$split" "${name% }" "${flags[@]}" "${extra[@]}"
    done
  done
}

main() {
  local name
  read_arguments "$@"
  [ "$stage" != train ] || find_conf # before any work
  if [ "$stage" != eval ]; then prepare; fi
  [ "$stage" != prepare ] || { echo "The data is in $out/data."; next train --conf conf/NAME.yaml --out "$out"; return 0; }
  [ -d "$out/data" ] || die "there is no $out/data: run the stage prepare first."
  find_conf
  name=$(realpath --relative-to "$here/conf" -- "$conf")
  name=${name%.yaml}
  name=${name//..\//}
  case $stage in
    train) train "$name" "$conf"; next eval --conf "$conf" --out "$out" ;;
    eval) evaluate "$name" ;;
  esac
}
