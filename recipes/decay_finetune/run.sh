#!/usr/bin/env bash
# A pretrained softmax language model becomes recurrent: Mao 2022 (arXiv 2210.04243). Takes a model, puts each of rows.yaml in the
# place of its attention, fine-tunes, and writes perplexities of source, converted and fine-tuned models into one table.
# What is done is not done again. The small comparison on the PEPs, whose source it trains, takes about an hour on a core.
#
#   bash recipes/decay_finetune/run.sh [prepare|train|eval|all] [--corpus peps] [--data FOLDER] [--out FOLDER]
#                                      [--rows NAME ...] [--lines N] [--source-updates N]
#                                      [flags for fairseq-train, of the fine-tuning]
#   bash recipes/decay_finetune/run.sh all --corpus wikitext103 --model adaptive_lm_wiki103.v2/model.pt --data FOLDER
#   bash recipes/decay_finetune/run.sh all --corpus gpt2 --model FOLDER --data FOLDER
#
# --model ...     wikitext103: fairseq's checkpoint with its dict.txt; gpt2: config.json, model.safetensors, and vocab.json with
#                 merges.txt (or encoder.json with vocab.bpe). For peps one is trained here
# --data FOLDER   peps: train, valid and test as .txt or .txt.gz (data/peps); wikitext103: wiki.*.tokens or train.txt, ...; gpt2:
#                 raw train.txt, valid.txt and test.txt, where a line <|endoftext|> stands between two documents
# --out FOLDER    where everything goes (runs/decay_finetune/CORPUS)
# --rows ...      which of rows.yaml (all)
# --lines N       evaluates on the first N lines of valid and test alone: a trial
# --source-updates N   peps: how long the source is trained (4000). A trial of everything takes a few minutes:
#                 --source-updates 20 --rows softmax decay_m4 --max-update 4 --warmup-updates 1 --lines 50 --out runs/decay_trial
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots -- "$@"
# shellcheck source=recipes/lm_comparison.sh
. "$here/../lm_comparison.sh" # prepare: the PEPs in pieces of words

corpus=peps model='' data='' out='' rows='' source_updates='' merges=8000
plugin=(--user-dir "$here/mao_ablations")
declare -A formats=([peps]=fairseq-lm [wikitext103]=fairseq-lm [gpt2]=gpt2)

table() { python "$here/rows.py" "$1" "$here/rows.yaml" "$corpus" "${@:2}"; }

read_arguments() {
  stage=all extra=()
  case ${1:-} in
    prepare | train | eval | all) stage=$1; shift ;;
    [!-]*) die "there is no stage $1: it is prepare, train, eval or all." ;;
  esac
  while [ $# -gt 0 ]; do
    case $1 in
      --rows)
        read_names "$@"
        rows=$names
        shift $((taken + 1)) ;;
      --corpus | --model | --data | --out | --lines)
        [ -n "${2:-}" ] || die "$1 needs a value."
        [ "$1" != --lines ] || check_lines "$2"
        printf -v "${1#--}" %s "$2"
        shift 2 ;;
      --source-updates)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--source-updates must be a whole number of at least 1, got '${2:-}'."
        source_updates=$2
        shift 2 ;;
      --save-dir) die "--save-dir is set by the recipe (--out): leave it out." ;;
      *) extra+=("$1"); shift ;;
    esac
  done
  [ -n "${formats[$corpus]:-}" ] || die "there is no corpus $corpus: it is peps, wikitext103 or gpt2."
  [ -z "$source_updates" ] || [ "$corpus" = peps ] || die "--source-updates is of --corpus peps: others are not trained here."
  data=${data:-$root/data/peps} out=${out:-$root/runs/decay_finetune/$corpus}
  [[ $out = /* ]] || out=$PWD/$out
  [[ $data = /* ]] || data=$PWD/$data
  local name known
  known=$(table names)
  rows=${rows:-$known}
  for name in $rows; do
    [[ " $known " = *" $name "* ]] || die "there is no row $name: they are $known."
  done
  # Before any work: those of the fine-tuning come last.
  [ ${#extra[@]} = 0 ] ||
    python "$tools/train_flags.py" "$data" "${plugin[@]}" --task language_modeling --arch fwp_lm "${extra[@]}" || exit 1
  [ "$(table start)" = source ] || rows="softmax $rows" # what they start from; what is done is not done again
}

prepare_all() { # the source as softmax model of this plugin, and the text in its words
  [ -d "$data" ] || die "there is no folder $data: give --data, see the top of run.sh."
  if [ "$corpus" = peps ]; then
    [ -z "$model" ] || die "the model of peps is trained here: leave out --model."
    prepare
    local extra=() task=(--task language_modeling)
    # A tenth of them warms up, as in source.yaml.
    [ -z "$source_updates" ] || extra=(--max-update "$source_updates" --warmup-updates $((source_updates / 10)))
    train source "$here/conf/peps/source.yaml"
    convert_source "$out/source/checkpoint_best.pt" --vocabulary "$out/data/bin/dict.txt"
  else
    [ -e "$model" ] || die "give --model: what --corpus $corpus starts from, see the top of run.sh."
    convert_source "$model"
    prepare_text
  fi
}

convert_source() { # convert_source MODEL FLAGS...
  [ -d "$out/softmax/converted" ] || run fwp-convert --source "${formats[$corpus]}" "$@" --out "$out/softmax/converted"
}

prepare_text() { # of wikitext103 and gpt2
  local work=$out/data.unfinished split file what="${lines:-all} lines of valid and test"
  if [ -d "$out/data" ]; then
    [ ! -e "$out/data/source.txt" ] || check_same "$out/data/source.txt" "$what"
    return
  fi
  rm -rf "$work"
  mkdir -p "$work/bpe"
  for split in train valid test; do
    file=$data/$split.txt
    [ "$corpus" != wikitext103 ] || [ -f "$file" ] || file=$data/wiki.$split.tokens
    [ -f "$file" ] || die "$file is missing: see the top of run.sh."
    if [ -n "$lines" ] && [ $split != train ]; then
      head -n "$lines" "$file" >"$work/first"
      file=$work/first
    fi
    if [ "$corpus" = gpt2 ]; then
      run python "$here/bpe.py" "$model" "$file" "$work/bpe/$split.txt"
    else
      cp "$file" "$work/bpe/$split.txt"
    fi
  done
  run_to "$work/preprocess.log" fairseq-preprocess --only-source --srcdict "$out/softmax/converted/dict.txt" \
    --trainpref "$work/bpe/train.txt" --validpref "$work/bpe/valid.txt" --testpref "$work/bpe/test.txt" \
    --destdir "$work/bin" --workers "$(nproc)" || die "fairseq-preprocess failed: see $work/preprocess.log."
  rm -f "$work/bpe/train.txt" "$work/first"
  echo "$what" >"$work/source.txt"
  mv "$work" "$out/data" # only now does it count
}

convert_row() { # convert_row NAME
  local target from=$out/softmax/converted/checkpoint.pt
  target=$(table target "$1")
  [ -n "$target" ] && [ ! -d "$out/$1/converted" ] || return 0
  [ "$(table start)" = source ] || from=$out/softmax/checkpoint_best.pt
  # shellcheck disable=SC2086
  run fwp-convert "${plugin[@]}" --source fwp-lm "$from" --vocabulary "$out/data/bin/dict.txt" --out "$out/$1/converted" $target
}

finetune() { # finetune NAME
  local task
  read -ra task <"$out/$1/converted/flags.txt"
  local extra=("${plugin[@]}" --finetune-from-model "$out/$1/converted/checkpoint.pt" "${extra[@]}")
  train "$1" "$here/conf/$corpus/finetune.yaml"
  [ -e "$out/$1/checkpoint_best.pt" ] || [ -e "$out/$1/diverged" ] ||
    echo "no validation perplexity was a number" >"$out/$1/diverged"
}

measure() { # measure CHECKPOINT FOLDER SPLIT CONTEXT: fwp-eval-lm, every token of the split, into FOLDER/SPLIT CONTEXT.json
  local result="$2/$3 $4.json"
  [ ! -e "$result" ] || return 0
  if run fwp-eval-lm "$out/data/bin" "${plugin[@]}" --path "$1" --gen-subset "$3" --tokens-per-sample "$tokens" \
    --context-window "$4" --no-progress-bar --json "$result.unfinished"; then
    run python "$tools/lm_results.py" check "$result.unfinished" "$out/data/bpe/$3.txt"
  else # what has just been converted may give probabilities of zero
    [ "${2##*/}" = converted ] || die "the evaluation of $1 failed."
    echo '{"perplexity": Infinity}' >"$result.unfinished"
  fi
  mv "$result.unfinished" "$result"
}

evaluate() { # evaluate NAME: the source by every measure, what it was converted to by the first alone
  local measures measure tokens checkpoint
  tokens=$(table tokens "$out")
  checkpoint=$out/$1/checkpoint_$(table checkpoint).pt
  measures=$(table measures)
  mapfile -t measures <<<"$measures"
  # shellcheck disable=SC2086
  measure "$out/$1/converted/checkpoint.pt" "$out/$1/converted" ${measures[0]}
  [ ! -e "$out/$1/diverged" ] || return 0
  [ -e "$out/$1/trained" ] || die "$1 is not trained: run the stage train first."
  for measure in "${measures[@]}"; do
    # shellcheck disable=SC2086
    measure "$checkpoint" "$out/$1" $measure
    # shellcheck disable=SC2086
    [ "$1" != softmax ] || measure "$out/softmax/converted/checkpoint.pt" "$out/softmax/converted" $measure
  done
}

main() {
  local name
  case $stage in prepare | all) prepare_all ;; esac
  [ -d "$out/data" ] && [ -d "$out/softmax/converted" ] || die "there is no source in $out: run the stage prepare first."
  case $stage in
    train | all)
      for name in $rows; do
        convert_row "$name"
        finetune "$name"
      done ;;
  esac
  case $stage in
    eval | all)
      for name in $rows; do evaluate "$name"; done
      table csv "$out" >"$out/results.csv"
      table table "$out/results.csv" >"$out/table.md"
      cat "$out/table.md" ;;
  esac
}

read_arguments "$@"
main
